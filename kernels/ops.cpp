// The operations of one instruction set; the build compiles this file once per set.

#include "ops.h"

#include "attention.h"
#include "int8_products.h"
#include "logits.h"
#include "products.h"
#include "rows.h"

namespace {

using namespace headway;

const Ops OPS = {multiply,     multiply_int8, attend,        norm,         norm_rotate,
                 to_bf16,      quantize_row,  write_kv,      sum_kv,       clear_values,
                 embed,        thread_end,    softmax_row,   sum_at_least, sum_chunks_above,
                 copy_between, sum_exp,       list_at_least, count_above,  mask_row,
                 find_best};

}  // namespace

namespace headway {

#define HW_NAME_OF(isa) isa##_ops
#define HW_NAME(isa) HW_NAME_OF(isa)
const Ops* HW_NAME(HW_ISA_NAME)() { return &OPS; }

}  // namespace headway
