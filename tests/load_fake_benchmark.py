"""Stands for SGLang's benchmark in tests of the driver: writes one result line, fails or dies as the seed says."""

import argparse
import json
import os
import time
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("backend", "base-url", "model", "tokenizer", "dataset-name", "random-range-ratio", "output-file"):
        parser.add_argument(f"--{name}")
    for name in ("num-prompts", "random-input-len", "random-output-len", "max-concurrency", "warmup-requests", "seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--output-details", action="store_true")
    parser.add_argument("--disable-tqdm", action="store_true")
    args = parser.parse_args()
    print("benchmark prints to its log", args.seed)
    if args.seed == 100:
        raise ValueError("benchmark broke")
    if args.seed == 101:
        os._exit(9)
    if args.seed == 102:
        time.sleep(60)
    count, tokens = args.num_prompts, args.random_output_len
    result = {
        "duration": 2.0,
        "ttfts": [0.25] * count,
        "itls": [[0.125] * (tokens - 1)] * count,
        "output_lens": [tokens] * count,
        "errors": [""] * count,
    }
    with Path(args.output_file).open("a") as output:
        output.write(json.dumps(result) + "\n")
