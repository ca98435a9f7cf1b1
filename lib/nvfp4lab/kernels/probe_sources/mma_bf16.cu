// The bf16 product that weight-only kernels (Marlin) use after unpacking FP4: present on every GPU since SM80.
#include <cstdint>

extern "C" __global__ void mma_bf16(const uint32_t *a, const uint32_t *b, float *d) {
  const int lane = threadIdx.x;
  float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a[4 * lane]), "r"(a[4 * lane + 1]), "r"(a[4 * lane + 2]), "r"(a[4 * lane + 3]), "r"(b[2 * lane]),
        "r"(b[2 * lane + 1]));
  d[4 * lane] = c0;
  d[4 * lane + 1] = c1;
  d[4 * lane + 2] = c2;
  d[4 * lane + 3] = c3;
}
