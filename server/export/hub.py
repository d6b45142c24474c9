"""An exported directory to the Hugging Face hub. Coming back needs nothing here: its repository is a model like any."""

from __future__ import annotations

from pathlib import Path

from neuronserve.neuron_worker.errors import ConfigError


def push(directory: Path, repository: str, *, private: bool = False) -> str:
    """A line that says where it is."""
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        made = hub.create_repo(repository, private=private, exist_ok=True)
        done = hub.upload_folder(repo_id=made.repo_id, folder_path=directory, commit_message="Exported by neuronserve")
    except Exception as error:  # the hub's own errors have no common base
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"push_to_hub={repository!r}: {why}; the export is in {directory}, upload it later with "
            f"hf upload {repository} {directory}"
        ) from None
    return f"uploaded to {repository} ({done.oid[:12]})"
