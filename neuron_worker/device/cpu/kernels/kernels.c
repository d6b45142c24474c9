/* All kernels for one instruction set; `build.py` compiles this once per set, with VARIANT and its options. */
#include "linear.h"
#include "pack.h"
#include "rows.h"
#include "attention.h"
#include "sampling.h"
#include "names.h"

const struct kernels JOIN(ns_kernels_, VARIANT) = {
    .name = TEXT(VARIANT),
    .panel_width = PANEL,
    .max_rows = MAX_ROWS,
    .keeps = KEEPS,
    .count = {[OP_EMBED] = count_rows, [OP_NORM] = count_rows, [OP_LINEAR] = count_linear, [OP_HEAD_NORM] = count_rows,
              [OP_PLACE] = count_rows, [OP_ATTEND] = count_attend, [OP_SELECT] = count_rows,
              [OP_SAMPLE] = count_sample, [OP_GATHER] = count_rows, [OP_SCORE] = count_rows, [OP_KEEP] = count_rows,
              [OP_RECALL] = count_rows, [OP_JOIN] = count_rows, [OP_GUESS] = count_rows},
    .run = {[OP_EMBED] = run_embed, [OP_NORM] = run_norm, [OP_LINEAR] = run_linear, [OP_HEAD_NORM] = run_head_norm,
            [OP_PLACE] = run_place, [OP_ATTEND] = run_attend, [OP_SELECT] = run_select, [OP_SAMPLE] = run_sample,
            [OP_GATHER] = run_gather, [OP_SCORE] = run_score, [OP_KEEP] = run_keep, [OP_RECALL] = run_recall,
            [OP_JOIN] = run_join, [OP_GUESS] = run_guess},
    .pack = pack,
};
