"""From builds to evidence: plans what to build, runs it within the machine's memory, says what it means for the card."""

import concurrent.futures
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from nvfp4lab.batch.progress import Progress
from nvfp4lab.errors import LabError
from nvfp4lab.kernels import compile_modules, compile_sass, compile_sources, compile_toolchain
from nvfp4lab.kernels.compile import Build, Builder, Limits
from nvfp4lab.kernels.compile_modules import Module, Unit
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger, Number, Stack, Target, Verdict, WrongKind
from nvfp4lab.stack import capture

# Shared memory that one block may use after opting in, bytes, by compute capability major: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability".
SHARED_LIMIT_BYTES = {9: 232_448, 10: 232_448, 11: 232_448, 12: 101_376}


@dataclasses.dataclass(frozen=True)
class Job:
    """One unit for one architecture.

    reason: why it is not to be built, "" if it is. options: of the command line that asks for it: version and units.
    """

    module: Module
    unit: Unit | None
    arch: str
    reason: str = ""
    verdict: Verdict = Verdict.NOT_RUN
    options: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """For example "compile:flashinfer.fp4_gemm_cutlass_sm120:bf16_128x128x256:sm_120a"."""
        unit = f":{self.unit.name}" if self.unit else ""
        return f"compile:{self.module.full_name}{unit}:sm_{self.arch}"

    @property
    def repro(self) -> str:
        """The command that repeats this job alone."""
        return shlex.join(["nvfp4lab", "compile", "--arch", self.arch, "--module", self.module.full_name, *self.options])

    @property
    def target(self) -> Target:
        """The GPU that the architecture stands for, by compute capability."""
        return Target(compute_capability(self.arch), present=False)


def compute_capability(arch: str) -> str:
    """ "12.0" of "120a"."""
    digits = re.sub("[af]$", "", arch)
    return f"{digits[:-1]}.{digits[-1]}"


def plan(
    names: Sequence[str], archs: Sequence[str], versions: Mapping[str, str | None], all_units: bool = False
) -> tuple[list[Job], dict[str, compile_sources.Sources]]:
    """Jobs for the modules named (none: the quick ones), and the sources they need.

    versions: package name -> what `compile_sources.locate` takes; flashinfer None: what that SGLang pins. A package that
    cannot be had gives jobs that say so.
    """
    modules = [compile_modules.find(name) for name in names or compile_modules.QUICK]
    sources, missing, asked = {}, {}, dict(versions)
    for package in sorted({module.package for module in modules} - {"lab"}):
        try:
            asked[package] = versions[package] or compile_sources.pinned_flashinfer(versions["sglang"])
            sources[package] = compile_sources.locate(package, asked[package])
        except LabError as error:
            missing[package] = str(error)
    jobs = [
        dataclasses.replace(job, options=_options(module, asked.get(module.package), all_units))
        for module in modules
        for arch in archs
        for job in _jobs(module, arch, sources, missing, all_units)
    ]
    return jobs, sources


def _options(module: Module, version: str | None, all_units: bool) -> tuple[str, ...]:
    return (*((f"--{module.package}", version) if version else ()), *(("--all-units",) if all_units else ()))


def prepare(p: Params) -> tuple[list[Job], Builder | None]:
    """Jobs and builder for a run's parameters; no builder where there is no toolchain."""
    versions = {"sglang": p.sglang, "flashinfer": p.flashinfer}
    if reason := no_toolchain():
        modules = [compile_modules.find(name) for name in p.compile_modules or compile_modules.QUICK]
        of = {module.full_name: _options(module, versions.get(module.package), p.compile_all_units) for module in modules}
        return [
            Job(module, None, arch, reason, options=of[module.full_name]) for module in modules for arch in p.compile_archs
        ], None
    jobs, sources = plan(p.compile_modules, p.compile_archs, versions, p.compile_all_units)
    allowed_bytes = min(int(p.compile_memory_gib * 2**30), psutil.virtual_memory().available)  # or the system would kill others
    limits = Limits(p.compile_timeout_s, allowed_bytes)
    return jobs, Builder(compile_toolchain.find(), sources, limits)


def collect(p: Params) -> Iterator[Evidence]:
    """Do what the parameters ask, with progress on stderr; each evidence is in the run's ledger when it is yielded."""
    jobs, builder = prepare(p)
    ledger = Ledger(Path(p.run_dir) / "ledger.jsonl")
    with Progress(len(jobs), "compile") as progress:
        for evidence in run(jobs, builder, capture(), p.compile_memory_gib):
            ledger.append(evidence)
            progress.step(describe(evidence))
            yield evidence


def describe(evidence: Evidence) -> str:
    """One line for a person: what was built, what came out."""
    seconds = evidence.number("compile_s")
    took = f" in {seconds.value:.0f} s" if seconds else ""
    said = f"tensor cores: {evidence.details['tensor_path']}" if evidence.verdict is Verdict.OK else evidence.reason
    return f"{evidence.subject.removeprefix('compile:')}: {evidence.verdict}{took}; {said}"


def what_stands_out(rows: Sequence[Evidence]) -> str:
    """Whatever is not ok: verdict and reason once for all that share them, what it holds for, and how to repeat the first."""
    alike: dict[tuple[str, str, str], list[Evidence]] = {}
    for row in rows:
        if row.verdict is not Verdict.OK:
            alike.setdefault((row.subject.split(":")[1], row.verdict, row.reason), []).append(row)
    blocks = []
    for (module, verdict, reason), found in alike.items():
        parts = ", ".join(row.subject.split(":", 2)[2] for row in found)
        blocks.append(f"{verdict:12} {module}: {reason}\n    {parts}\n    {found[0].repro}")
    return "\n".join(blocks)


def _jobs(module: Module, arch: str, sources: Mapping, missing: Mapping[str, str], all_units: bool) -> Iterator[Job]:
    if module.package in missing:
        yield Job(module, None, arch, missing[module.package])
        return
    if module.needs_tvm_ffi and not compile_toolchain.tvm_ffi_headers():
        yield Job(module, None, arch, "its headers need those of the package apache-tvm-ffi, which is not installed")
        return
    root = sources[module.package].root if module.package in sources else None
    try:
        majors, units = module.majors(root), module.units(root)
    except LabError as error:
        yield Job(module, None, arch, str(error))
        return
    major = int(compute_capability(arch).split(".")[0])
    if majors is not None and major not in majors:
        reason = f"{module.package} {sources[module.package].version} builds it for compute capability majors {majors} alone"
        yield Job(module, None, arch, reason, Verdict.UNSUPPORTED)
        return
    yield from (Job(module, unit, arch) for unit in (units if all_units else units[:1]))


def run(jobs: Sequence[Job], builder: Builder | None, stack: Stack, memory_gib: float) -> Iterator[Evidence]:
    """Evidence of each job, in order. builder may be None if no job is to be built.

    As many nvcc run at once as there are cores and as fit into `memory_gib` and what is free.
    """
    free_gib = min(memory_gib, psutil.virtual_memory().available / 2**30)
    largest_gib = max((job.module.peak_gib for job in jobs), default=1.0)
    workers = max(1, min(os.cpu_count() or 1, int(free_gib // largest_gib)))
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(_run_job, job, builder, stack) for job in jobs]
        for future in futures:
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_job(job: Job, builder: Builder | None, stack: Stack) -> Evidence:
    if job.reason:
        return Evidence("compile", job.subject, job.target, stack, job.verdict, job.repro, job.reason)
    build, was_cached = builder.build(job.module, job.unit, job.arch)
    verdict, reason, kind = judge(job, build)
    source = builder.sources.get(job.module.package)
    details = {
        "about": job.module.about,
        "compiler": builder.toolchain.release,
        "sources": f"{source.package} {source.version} ({source.digest})" if source else "nvfp4lab",
        "was_cached": was_cached,
        "tensor_path": compile_sass.tensor_path(compile_sass.tensor_histogram(_relevant(job, build))),
        "tensor_instructions": compile_sass.tensor_histogram(_relevant(job, build)),
        "requested_shared_bytes": dict(build.requested_shared_bytes),
        "kernels": [_kernel_details(kernel) for kernel in _relevant(job, build)],
    }
    if build.output_tail:
        details["output_tail"] = build.output_tail
    numbers, built = _numbers(job, build), stack_of(builder, job, stack)
    return Evidence("compile", job.subject, job.target, built, verdict, job.repro, reason, kind, numbers, details=details)


def stack_of(builder: Builder, job: Job, here: Stack) -> Stack:
    """The stack that a build holds for: the sources that were built and the compiler, whatever is installed here."""
    source = builder.sources.get(job.module.package)
    versions = {source.package: source.version} if source else {}
    return Stack(**versions, cuda=builder.toolchain.release, python=here.python, machine=here.machine, lab_commit=here.lab_commit)


def table(rows: Sequence[Evidence]) -> pd.DataFrame:
    """What was built, a line each: registers, bytes of shared memory against the limit and of spills, CPU seconds of the build.

    Registers and bytes are those of the hungriest kernel of the unit.
    """
    columns = (
        "registers",
        "requested_shared_bytes",
        "shared_limit_bytes",
        "static_shared_bytes",
        "spill_bytes",
        "kernels",
        "kernels_that_spill",
        "compile_cpu_s",
    )
    built = [row for row in rows if row.verdict is Verdict.OK]
    values = [{name: found.value for name in columns if (found := row.number(name))} for row in built]
    frame = pd.DataFrame(values, index=[row.subject.removeprefix("compile:") for row in built], columns=columns)
    return frame.astype({name: "Int64" for name in columns[:-1]}).rename_axis("built")


def _kernel_details(kernel: compile_sass.Kernel) -> dict[str, Any]:
    return dataclasses.asdict(kernel) | {"name": kernel.short_name, "tensor_instructions": dict(kernel.tensor_instructions)}


def no_toolchain() -> str:
    """Why nothing can be built here; "" if it can."""
    try:
        compile_toolchain.find()
    except compile_toolchain.NoToolchain as error:
        return str(error)
    return ""


def _relevant(job: Job, build: Build) -> list[compile_sass.Kernel]:
    return [kernel for kernel in build.kernels if re.fullmatch(job.unit.kernel, kernel.short_name.rpartition("::")[2])]


def judge(job: Job, build: Build) -> tuple[Verdict, str, WrongKind | None]:
    """What a build says about the card: verdict, reason, kind of wrong."""
    if build.verdict is not Verdict.OK:
        return build.verdict, build.reason, None
    kernels = _relevant(job, build)
    if not kernels:
        return Verdict.CRASH, f"the object holds no kernel named {job.unit.kernel!r}: the sources have changed", None
    empty = [kernel.short_name for kernel in kernels if kernel.is_empty]
    if empty:
        reason = f"{empty[0]} builds to an empty body: a launch would succeed and leave the output as it was"
        return Verdict.WRONG, reason, WrongKind.GARBAGE
    if job.unit.multiplies and not compile_sass.tensor_histogram(kernels):
        return (
            Verdict.CRASH,
            f"{kernels[0].short_name} holds no tensor-core instruction: it ends without a product",
            None,
        )
    limit = SHARED_LIMIT_BYTES.get(int(job.target.cc.split(".")[0]))
    asked = _shared_bytes(job, build)
    if limit is not None and asked > limit:
        return Verdict.CRASH, f"asks for {asked:,} B of shared memory a block, the card has {limit:,}: the launch would fail", None
    return Verdict.OK, "", None


def _shared_bytes(job: Job, build: Build) -> int:
    """The most that a kernel of the unit asks for: static, or dynamic where the unit tells."""
    return max([kernel.static_shared_bytes for kernel in _relevant(job, build)] + list(build.requested_shared_bytes.values()))


def _numbers(job: Job, build: Build) -> tuple[Number, ...]:
    numbers = [
        Number("compile_s", round(build.compile_s, 2), "s"),
        Number("compile_cpu_s", round(build.compile_cpu_s, 2), "s"),
        Number("compiler_peak_rss_bytes", build.peak_rss_bytes, "B"),
    ]
    kernels = _relevant(job, build)
    if build.verdict is Verdict.OK and kernels:
        limit = SHARED_LIMIT_BYTES.get(int(job.target.cc.split(".")[0]))
        numbers += [
            Number("kernels", len(kernels), ""),
            Number("registers", max(kernel.registers for kernel in kernels), ""),
            Number("static_shared_bytes", max(kernel.static_shared_bytes for kernel in kernels), "B"),
            Number("spill_bytes", max(kernel.spill_bytes for kernel in kernels), "B"),
            Number("kernels_that_spill", sum(kernel.spill_bytes > 0 for kernel in kernels), ""),
            Number("tensor_instructions", sum(compile_sass.tensor_histogram(kernels).values()), ""),
            Number("fp4_conversions", sum(kernel.fp4_conversions for kernel in kernels), ""),
        ]
        if build.requested_shared_bytes:
            numbers.append(Number("requested_shared_bytes", max(build.requested_shared_bytes.values()), "B"))
        if limit is not None:
            numbers.append(Number("shared_limit_bytes", limit, "B"))
    return tuple(numbers)
