/* Products of int8 with int8 for one instruction set; `build.py` compiles this once per set, with VARIANT and its
 * options. They stand beside the kernels whose panels are as wide. */
#include "dot.h"
#include "names.h"

const struct dots JOIN(ns_dots_, VARIANT) = {
    .name = TEXT(VARIANT),
    .count_round = count_rows,
    .run_round = run_round,
    .count_dot = count_dot,
    .run_dot = run_dot,
};
