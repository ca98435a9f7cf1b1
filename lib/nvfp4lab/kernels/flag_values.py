"""Names of kernels and the flags of SGLang that lead to them."""

# Which value of which SGLang flag reaches which kernel here. A kernel that no flag value names is compared with nothing.
FLAG_OF: dict[str, tuple[str, str]] = {
    "sglang.gptq_marlin_gemm": ("fp4_gemm", "marlin"),
    "flashinfer.mm_fp4.cudnn": ("fp4_gemm", "flashinfer_cudnn"),
    "flashinfer.mm_fp4.cutlass": ("fp4_gemm", "flashinfer_cutlass"),
    "flashinfer.mm_fp4.trtllm": ("fp4_gemm", "flashinfer_trtllm"),
    "flashinfer.mm_fp4.cute-dsl": ("fp4_gemm", "flashinfer_cutedsl"),
    "sglang.moe_wna16_marlin_gemm": ("moe", "marlin"),
    "sglang.cutlass_fp4_group_mm": ("moe", "cutlass"),
    "flashinfer.cutlass_fused_moe": ("moe", "flashinfer_cutlass"),
    "flashinfer.trtllm_fp4_block_scale_moe": ("moe", "flashinfer_trtllm"),
    "flashinfer.trtllm_fp4_block_scale_routed_moe": ("moe", "flashinfer_trtllm_routed"),
    "flashinfer.cute_dsl_fused_moe_nvfp4": ("moe", "flashinfer_cutedsl"),
}
