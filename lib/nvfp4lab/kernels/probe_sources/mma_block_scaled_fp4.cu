// The warp-level block-scaled FP4 product of SM120 and SM121: e2m1 operands, one ue4m3 scale per 16 values.
// PTX ISA, "Warp-level matrix instructions: mma with block scaling", kind::mxf4nvf4, scale_vec::4X, shape m16n8k64.
#include <cstdint>

extern "C" __global__ void mma_block_scaled_fp4(const uint32_t *a, const uint32_t *b, const uint32_t *scales, float *d) {
  const int lane = threadIdx.x;
  float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, 0}, %11, {0, 0};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a[4 * lane]), "r"(a[4 * lane + 1]), "r"(a[4 * lane + 2]), "r"(a[4 * lane + 3]), "r"(b[2 * lane]),
        "r"(b[2 * lane + 1]), "r"(scales[2 * lane]), "r"(scales[2 * lane + 1]));
  d[4 * lane] = c0;
  d[4 * lane + 1] = c1;
  d[4 * lane + 2] = c2;
  d[4 * lane + 3] = c3;
}
