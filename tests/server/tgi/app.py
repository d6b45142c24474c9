"""vLLM's real app with our routes on it, without an engine: enough for whatever is decided before one is asked."""

from __future__ import annotations

from fastapi import FastAPI


def build(*words: str) -> FastAPI:
    """As `vllm serve model *words` builds it."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["model", *words])
    return build_app(args, supported_tasks=("generate",))
