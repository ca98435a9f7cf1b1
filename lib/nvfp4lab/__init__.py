"""NVFP4 Lab: which FP4 backends of SGLang are right, which are fast, and how do we know?

Where to look:

- `records`   what every stage writes: Target, Stack, Verdict, Evidence, and the ledger
- `params`    what every run is asked: one typed schema for YAML, papermill and notebooks
- `source`    stage 1, reads SGLang and FlashInfer without importing them
- `nvfp4`     the number format: codec, layouts, checkpoints, fixture models, audit
- `kernels`   stage 2, kernels against inputs whose right answer is known
- `server`    stage 3, whole servers started, judged and measured
- `batch`     many notebooks and many hosts
- `report`    pictures, pages, redaction
- `decide`    the launch command and the reasons
- `bundle`    all of it for a GPU host without internet
- `commands`  one file a subcommand of `nvfp4lab`
"""

__version__ = "0.1.0"
