"""A folder that lets a GPU host without internet serve NVFP4 models within seconds.

`recipe` says what goes in (data in `recipe.yaml`), `wheels` installs and trims packages for the host's Python, `kernels`
compiles JIT modules with nvcc on a machine without a GPU into the caches where SGLang and FlashInfer look, `pack` writes
the `activate` script, the manifest and the split archive.
"""
