"""Builds a backend's own sources for a GPU that need not be here, and reads the machine code.

`Builder.build(module, unit, arch)` runs one nvcc, bounded in time and memory, cached by source, flags and compiler.
What the result means for the card is said in `compile_evidence`.
"""

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvfp4lab.kernels import compile_modules, compile_sass, compile_sources, compile_toolchain, isolate_proc
from nvfp4lab.kernels.compile_modules import Module, Unit
from nvfp4lab.kernels.compile_sass import Kernel
from nvfp4lab.records import Verdict
from nvfp4lab.source import fetch

FORMAT = 2  # of the cache; part of its key
_POLL_S = 0.2
_MORE_MEMORY = "free memory, raise compile_memory_gib, or build on a larger machine"


@dataclasses.dataclass(frozen=True)
class Build:
    """What one nvcc call gave. Survives JSON.

    verdict: OK if a cubin came out; else UNSUPPORTED (the compiler refuses the target), NOT_RUN (something is missing on this
    machine), OOM, HANG or CRASH, with reason.
    requested_shared_bytes: label -> dynamic shared memory that the kernel asks for at launch. compile_s: by the clock;
    compile_cpu_s: by the processor, which does not grow on a busy or halted machine.
    """

    verdict: Verdict
    reason: str
    compile_s: float
    compile_cpu_s: float
    peak_rss_bytes: int
    kernels: tuple[Kernel, ...] = ()
    requested_shared_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    output_tail: str = ""

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Build":
        """Inverse of `to_json`."""
        row = json.loads(text)
        kernels = (Kernel(**one | {"tensor_instructions": tuple(map(tuple, one["tensor_instructions"]))}) for one in row["kernels"])
        return cls(**row | {"verdict": Verdict(row["verdict"]), "kernels": tuple(kernels)})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one nvcc call: seconds, and resident bytes of nvcc and its descendants."""

    timeout_s: float = 1800.0
    memory_bytes: int = 14 << 30


@dataclasses.dataclass(frozen=True)
class Builder:
    """Builds units with one toolchain. sources: package name -> its sources, for the packages that modules come from."""

    toolchain: compile_toolchain.Toolchain
    sources: Mapping[str, compile_sources.Sources]
    limits: Limits = dataclasses.field(default_factory=Limits)

    def command(self, module: Module, arch: str) -> list[str]:
        """The nvcc call, without the names of the files."""
        root = self._root(module)
        includes = [f"-I{root / folder}" for folder in module.include_dirs if (root / folder).is_dir()]
        ffi = compile_toolchain.tvm_ffi_headers() if module.needs_tvm_ffi else []
        for folder in [*ffi, *self.toolchain.include_dirs] if module.package != "lab" else []:
            includes += ["-isystem", str(folder)]
        define = [f"-DSGL_CUDA_ARCH={int(re.sub('[af]', '', arch)) * 10}"] if module.package == "sglang" else []
        return [str(self.toolchain.nvcc), "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", *module.flags, *define, *includes]

    def build(self, module: Module, unit: Unit, arch: str) -> tuple[Build, bool]:
        """The build of `unit`, and whether it came from the cache. Failures that depend on this machine are not cached."""
        kept = fetch.cache_dir() / "compile" / f"{self._key(module, unit, arch)}.json"
        if kept.exists():
            return Build.from_json(kept.read_text(encoding="utf-8")), True
        build = self._run(self.command(module, arch), unit)
        if build.verdict in (Verdict.OK, Verdict.UNSUPPORTED):
            kept.parent.mkdir(parents=True, exist_ok=True)
            fresh = kept.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
            fresh.write_text(build.to_json(), encoding="utf-8")
            fresh.replace(kept)
        return build, False

    def _root(self, module: Module) -> Path:
        return self.sources[module.package].root if module.package in self.sources else Path()

    def _key(self, module: Module, unit: Unit, arch: str) -> str:
        root = str(self._root(module))
        flags = [part.replace(root, "") for part in self.command(module, arch)[1:]]
        digest = self.sources[module.package].digest if module.package in self.sources else ""
        asked = [FORMAT, self.toolchain.release, digest, unit.source, flags]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]

    def _run(self, command: Sequence[str], unit: Unit) -> Build:
        with tempfile.TemporaryDirectory(prefix="nvfp4lab-compile-") as scratch:
            source, cubin, log = (Path(scratch) / name for name in (f"{unit.name}.cu", "out.cubin", "log.txt"))
            source.write_text(unit.source, encoding="utf-8")
            started = time.monotonic()
            with log.open("wb") as output:
                nvcc = subprocess.Popen(
                    [*command, "-o", str(cubin), str(source)], stdout=output, stderr=output, start_new_session=True, cwd=scratch
                )
            stopped, peak_rss_bytes, cpu_s = _watch(nvcc, self.limits)
            compile_s = time.monotonic() - started
            said = log.read_text(errors="replace")
            if stopped or nvcc.returncode != 0:
                verdict, reason = stopped or _failure(nvcc.returncode, said)
                return Build(verdict, reason, compile_s, cpu_s, peak_rss_bytes, output_tail=said[-4000:])
            sass = subprocess.run(
                [self.toolchain.cuobjdump, "-sass", cubin], capture_output=True, text=True, timeout=600, check=True
            )
            requested = compile_sass.symbol_sizes(cubin.read_bytes(), compile_modules.SHARED_PREFIX)
            return Build(Verdict.OK, "", compile_s, cpu_s, peak_rss_bytes, tuple(compile_sass.read(said, sass.stdout)), requested)


def _watch(nvcc: subprocess.Popen, limits: Limits) -> tuple[tuple[Verdict, str] | None, int, float]:
    """Wait for nvcc; kill it when over a limit. (verdict and reason if killed, peak resident bytes, CPU seconds of it all)."""
    started, peak, stopped, cpu_s = time.monotonic(), 0, None, None
    try:
        while (cpu_s := _cpu_seconds_if_ended(nvcc, os.WNOHANG)) is None:
            peak = max(peak, isolate_proc.rss_bytes(nvcc.pid))
            if peak > limits.memory_bytes:
                allowed = f"{limits.memory_bytes / 2**30:.1f} GiB"
                stopped = Verdict.OOM, f"the compiler used more than its {allowed}; {_MORE_MEMORY}"
            elif time.monotonic() - started > limits.timeout_s:
                stopped = Verdict.HANG, f"the compiler did not finish within {limits.timeout_s:g} s; raise compile_timeout_s"
            if stopped:
                break
            time.sleep(_POLL_S)
    finally:
        if cpu_s is None:
            os.killpg(nvcc.pid, signal.SIGKILL)
            cpu_s = _cpu_seconds_if_ended(nvcc)
    return stopped, peak, cpu_s


def _cpu_seconds_if_ended(nvcc: subprocess.Popen, options: int = 0) -> float | None:
    """CPU seconds of nvcc and what it waited for, its exit code taken into `nvcc`; None while it runs (with WNOHANG)."""
    pid, status, usage = os.wait4(nvcc.pid, options)
    if pid == 0:
        return None
    nvcc.returncode = os.waitstatus_to_exitcode(status)  # Popen cannot ask for it again
    return usage.ru_utime + usage.ru_stime


def _failure(returncode: int, said: str) -> tuple[Verdict, str]:
    errors = [line.strip() for line in said.splitlines() if re.search(r"\b(error|fatal)\b", line)]
    first = re.sub(r"^ptxas \S+, line \d+; error\s+: ", "ptxas: ", errors[0]) if errors else said.strip()[-300:]
    if "not supported on .target" in said:
        return Verdict.UNSUPPORTED, first
    if "Unsupported gpu architecture" in said or "is not defined for option 'gpu-architecture'" in said:
        return Verdict.UNSUPPORTED, f"this nvcc does not know the target: {first}"
    if missing := re.search(r"fatal error: (\S+): No such file or directory", said):
        why = f"the header {missing[1]} is not on this machine: install the part of the CUDA toolkit, or the package, that has it"
        return Verdict.NOT_RUN, why
    if "No space left on device" in said:
        return Verdict.NOT_RUN, f"no space left on {tempfile.gettempdir()}; set TMPDIR to a larger disk"
    if died := re.search(r"'(\w+)' died due to signal (\d+)", said):
        return _killed(died[1], int(died[2]))
    if returncode < 0:
        return _killed("nvcc", -returncode)
    return Verdict.CRASH, f"nvcc: exit code {returncode}: {first[:400]}"


def _killed(program: str, number: int) -> tuple[Verdict, str]:
    name = signal.Signals(number).name
    if number == signal.SIGKILL:  # we kill the whole group, and then it is we who say why
        return Verdict.OOM, f"{program} was killed by {name}, as the system does when memory runs out; {_MORE_MEMORY}"
    return Verdict.CRASH, f"{program} was killed by {name}"
