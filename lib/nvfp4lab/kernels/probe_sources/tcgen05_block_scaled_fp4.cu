// The tensor-memory block-scaled FP4 product of SM100 and SM103 (tcgen05); SM120 has no tensor memory.
// PTX ISA, "tcgen05.mma", kind::mxf4nvf4 with block scaling; descriptors come from the caller, only the instruction matters.
#include <cstdint>

extern "C" __global__ void tcgen05_block_scaled_fp4(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t scale_a,
                                                    uint32_t scale_b, uint32_t accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%0], %1, %2, %3, [%4], [%5], p;\n"
      "}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(idesc), "r"(scale_a), "r"(scale_b), "r"(accumulate)
      : "memory");
}
