"""Compile evidence: with a stand-in compiler everywhere, with the real one where there is a CUDA toolkit."""

import dataclasses
import json
import shlex
import stat
import struct
import sys
import time
import zipfile
from pathlib import Path

import pytest

from nvfp4lab.errors import LabError
from nvfp4lab.kernels import compile_evidence, compile_modules, compile_sass, compile_sources, compile_toolchain
from nvfp4lab.kernels.compile import Build, Builder, Limits
from nvfp4lab.kernels.compile_evidence import Job
from nvfp4lab.kernels.compile_modules import Module, Unit
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger, Stack, Verdict, WrongKind

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7cutlass13device_kernelINS_4gemmEEEvT_' for 'sm_120a'
ptxas info    : Function properties for _ZN7cutlass13device_kernelINS_4gemmEEEvT_
    40 bytes stack frame, 200 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 168 registers, used 8 barriers, 40 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compiling entry function 'plain_name' for 'sm_120a'
ptxas info    : Function properties for plain_name
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
"""
SASS = """
\t\tFunction : plain_name
        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */
                                                                 /* 0x000fe20000000800 */
        /*0010*/                   EXIT ;                        /* 0x000000000000794d */
        /*0020*/                   BRA 0x20;                     /* 0xfffffffc00fc7947 */
        /*0030*/                   NOP;                          /* 0x0000000000007918 */
\t\tFunction : _ZN7cutlass13device_kernelINS_4gemmEEEvT_
        /*0000*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R12, R4, R16, R17, URZ ;
        /*0010*/              @!P0 OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R12, R4, R16, R17, URZ ;
        /*0020*/                   F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R5, R5, R6, RZ ;
        /*a030*/             @UP1  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*1a040*/                  STG.E.128 desc[UR4][R2.64], R4 ;
        /*a050*/                   NOP;
"""


def test_kernels_are_read_from_ptxas_and_machine_code():
    gemm, plain = compile_sass.read(LOG, SASS)
    assert gemm.short_name == "cutlass::device_kernel"
    assert (gemm.registers, gemm.static_shared_bytes, gemm.spill_bytes) == (168, 1024, 296)
    assert dict(gemm.tensor_instructions) == {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 2, "HMMA.16816.F32.BF16": 1}
    assert (gemm.instructions, gemm.fp4_conversions, gemm.is_empty) == (5, 1, False)
    assert (plain.short_name, plain.registers, plain.instructions, plain.is_empty) == ("plain_name", 4, 3, True)


@pytest.mark.parametrize(
    ("opcodes", "path"),
    [
        (["OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "HMMA.16816.F32"], "block-scaled FP4"),
        (["UTCOMMA.4X"], "block-scaled FP4"),
        (["UTCQMMA"], "FP8"),
        (["HMMA.16816.F32.BF16"], "bf16/fp16"),
        (["HGMMA.64x256x16.F32.BF16"], "bf16/fp16"),
        (["DMMA.884"], "other: DMMA"),
        ([], "none"),
    ],
)
def test_the_family_of_instruction_names_the_arithmetic(opcodes, path):
    assert compile_sass.tensor_path(opcodes) == path


def elf(symbols: dict[str, int]) -> bytes:
    """A 64-bit ELF file with nothing but a symbol table."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in symbols)
    offsets = [1 + sum(len(other) + 1 for other in list(symbols)[:index]) for index in range(len(symbols))]
    table = b"".join(struct.pack("<IBBHQQ", at, 0, 0, 0, 0, size) for at, size in zip(offsets, symbols.values(), strict=True))
    body = strings + table
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(strings), 0, 0, 0, 0),
        struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, 64 + len(strings), len(table), 0, 0, 0, 24),
    ]
    header = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body)) + bytes(10) + struct.pack("<HH", 64, 2)
    return header.ljust(64, b"\0") + body + b"".join(sections)


def test_requested_shared_memory_is_the_size_of_its_symbol():
    cubin = elf({"nvfp4lab_shared_bytes_default": 99_328, "other": 7, "nvfp4lab_shared_bytes_streamk": 101_376})
    assert compile_sass.symbol_sizes(cubin, "nvfp4lab_shared_bytes_") == {"default": 99_328, "streamk": 101_376}
    with pytest.raises(ValueError, match="ELF"):
        compile_sass.symbol_sizes(b"MZ", "x")


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """A compiler that does what the source's first line says, and a disassembler that prints SASS."""
    monkeypatch.setenv("NVFP4LAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cubin").write_bytes(elf({"nvfp4lab_shared_bytes_default": 99_328}))
    nvcc, cuobjdump = tmp_path / "nvcc", tmp_path / "cuobjdump"
    nvcc.write_text(
        f"#!{sys.executable}\nimport sys, shutil, time\nfrom pathlib import Path\n"
        f"with Path({str(tmp_path / 'calls')!r}).open('a') as calls: print(*sys.argv[1:], file=calls)\n"
        f"log, cubin = {LOG!r}, {str(tmp_path / 'cubin')!r}\n"
        "exec(Path(sys.argv[-1]).read_text().splitlines()[0].removeprefix('//'))\n"
        "print(log, file=sys.stderr); shutil.copy(cubin, sys.argv[-2])\n"
    )
    cuobjdump.write_text(f"#!{sys.executable}\nprint({SASS!r})\n")
    for program in (nvcc, cuobjdump):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return compile_toolchain.Toolchain(nvcc, cuobjdump, "cuda_13.0", ())


def module(text: str, **changes) -> Module:
    return Module("toy", "lab", "a toy", lambda root: [Unit("one", text, "device_kernel")], **changes)


def build(toolchain, text: str, limits: Limits | None = None) -> tuple[Build, bool]:
    toy = module(text)
    return Builder(toolchain, {}, limits or Limits()).build(toy, toy.units(None)[0], "120a")


def test_a_build_is_read_and_kept_by_source_flags_target_and_compiler(toolchain, tmp_path):
    first, cached = build(toolchain, "//pass\n")
    assert (first.verdict, first.requested_shared_bytes, cached) == (Verdict.OK, {"default": 99_328}, False)
    assert [kernel.registers for kernel in first.kernels] == [168, 4]
    assert build(toolchain, "//pass\n") == (first, True)
    assert build(toolchain, "//pass # changed\n")[1] is False
    assert build(dataclasses.replace(toolchain, release="cuda_13.1"), "//pass\n")[1] is False
    toy = module("//pass\n", flags=("-G",))
    assert Builder(toolchain, {}).build(toy, toy.units(None)[0], "120a")[1] is False
    assert Builder(toolchain, {}).build(module("//pass\n"), toy.units(None)[0], "100a")[1] is False
    assert len((tmp_path / "calls").read_text().splitlines()) == 5


REFUSED = (
    "print('ptxas /tmp/x.ptx, line 5; error   : Instruction \\'tcgen05.mma\\' not supported on .target \\'sm_120a\\'');"
    "sys.exit(255)"
)


@pytest.mark.parametrize(
    ("does", "verdict", "reason"),
    [
        (REFUSED, Verdict.UNSUPPORTED, "ptxas: Instruction 'tcgen05.mma' not supported on .target 'sm_120a'"),
        (
            "print('nvcc fatal   : Unsupported gpu architecture \\'sm_103a\\''); sys.exit(1)",
            Verdict.UNSUPPORTED,
            "this nvcc does not",
        ),
        ("print('x.cu(3): error: expected a \\';\\''); sys.exit(2)", Verdict.CRASH, "nvcc: exit code 2: x.cu(3): error: expected"),
        (
            "print('x.cu:1:10: fatal error: curand_kernel.h: No such file or directory'); sys.exit(1)",
            Verdict.NOT_RUN,
            "the header curand_kernel.h is not on this machine: install",
        ),
        (
            "print('cicc: error: No space left on device'); sys.exit(1)",
            Verdict.NOT_RUN,
            "no space left on",
        ),
        (
            "print('nvcc error   : \\'cicc\\' died due to signal 9 (Kill signal)'); sys.exit(9)",
            Verdict.OOM,
            "cicc was killed by SIGKILL, as the system does when memory runs out; free memory",
        ),
        (
            "print('nvcc error   : \\'ptxas\\' died due to signal 11 (Invalid memory reference)'); sys.exit(11)",
            Verdict.CRASH,
            "ptxas was killed by SIGSEGV",
        ),
        ("import os; os.kill(os.getpid(), 11)", Verdict.CRASH, "nvcc was killed by SIGSEGV"),
        ("time.sleep(60)", Verdict.HANG, "the compiler did not finish within 1 s"),
        ("hoard = [b'x' * (1 << 20) for _ in range(600)]; time.sleep(60)", Verdict.OOM, "the compiler used more than its 0.2 GiB"),
    ],
)
def test_what_a_compiler_does_instead_of_building(toolchain, does, verdict, reason):
    started = time.monotonic()
    limits = {Verdict.HANG: Limits(timeout_s=1), Verdict.OOM: Limits(memory_bytes=1 << 28)}.get(verdict, Limits())
    got, _ = build(toolchain, f"//{does}\n", limits)
    assert (got.verdict, got.kernels) == (verdict, ())
    assert got.reason.startswith(reason)
    assert time.monotonic() - started < 20
    # A refusal holds for good; what this machine could not do today is tried again.
    assert build(toolchain, f"//{does}\n", limits)[1] is (verdict is Verdict.UNSUPPORTED)


def test_cpu_seconds_are_those_of_the_compilers_below_and_not_of_the_clock(toolchain):
    busy = "import subprocess; subprocess.run([sys.executable, '-c', 'while __import__(\\'time\\').process_time() < 0.6: pass'])"
    got, _ = build(toolchain, f"//{busy}; time.sleep(1)\n")
    assert got.verdict is Verdict.OK
    assert 0.6 <= got.compile_cpu_s <= got.compile_s - 0.9


KERNEL = compile_sass.Kernel("_ZN7cutlass13device_kernelEv", 168, 1024, 0, 900, (("OMMA.SF", 64),), 0, False)


@pytest.mark.parametrize(
    ("kernel", "requested", "arch", "verdict", "kind"),
    [
        ({}, {"default": 101_376}, "120a", Verdict.OK, None),
        ({}, {"default": 101_377}, "120a", Verdict.CRASH, None),
        ({}, {"default": 101_377}, "100a", Verdict.OK, None),
        ({"static_shared_bytes": 101_377}, {}, "121a", Verdict.CRASH, None),
        ({"is_empty": True}, {}, "90a", Verdict.WRONG, WrongKind.GARBAGE),
        ({"tensor_instructions": ()}, {}, "120a", Verdict.CRASH, None),
        ({"name": "_ZN3cub11EmptyKernelEv"}, {}, "120a", Verdict.CRASH, None),
        ({"name": "_ZN7cutlass20device_kernelDefaultEv"}, {}, "120a", Verdict.CRASH, None),
    ],
)
def test_what_a_build_says_about_the_card(kernel, requested, arch, verdict, kind):
    job = Job(module(""), Unit("one", "", "device_kernel"), arch)
    got = compile_evidence.judge(job, Build(Verdict.OK, "", 1.0, 1.0, 1, (dataclasses.replace(KERNEL, **kernel),), requested))
    assert (got[0], got[2]) == (verdict, kind)
    assert bool(got[1]) is (verdict is not Verdict.OK)


def test_an_empty_kernel_beside_those_that_matter_is_no_fault():
    """Marlin's `MarlinDefault`: its address says that there is no kernel, and it is never launched."""
    job = Job(module(""), Unit("one", "", "device_kernel"), "90a")
    marker = dataclasses.replace(KERNEL, name="_ZN7cutlass20device_kernelDefaultEv", is_empty=True, tensor_instructions=())
    assert compile_evidence.judge(job, Build(Verdict.OK, "", 1.0, 1.0, 1, (KERNEL, marker)))[0] is Verdict.OK


def test_a_kernel_that_only_converts_needs_no_tensor_core():
    job = Job(module(""), Unit("one", "", "device_kernel", multiplies=False), "120a")
    kernel = dataclasses.replace(KERNEL, tensor_instructions=(), fp4_conversions=8)
    assert compile_evidence.judge(job, Build(Verdict.OK, "", 1.0, 1.0, 1, (kernel,)))[0] is Verdict.OK


def test_evidence_carries_the_machine_code_and_how_to_repeat_it(toolchain):
    toy = module("//pass\n")
    [row] = compile_evidence.run(
        [Job(toy, toy.units(None)[0], "120a")], Builder(toolchain, {}), Stack(torch="2.14.1"), memory_gib=1
    )
    assert (row.stack.cuda, row.stack.torch) == ("cuda_13.0", None)
    assert Evidence.from_json(row.to_json()) == row
    assert (row.stage, row.subject, row.target.cc, row.target.present) == ("compile", "compile:lab.toy:one:sm_120a", "12.0", False)
    assert row.details["tensor_instructions"] == {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 2, "HMMA.16816.F32.BF16": 1}
    assert (row.number("requested_shared_bytes").value, row.number("shared_limit_bytes").value) == (99_328, 101_376)
    assert row.repro == "nvfp4lab compile --arch 120a --module lab.toy"


def test_a_build_gets_no_more_memory_than_is_free(monkeypatch, toolchain):
    monkeypatch.setattr(compile_toolchain, "find", lambda: toolchain)
    free = type("Memory", (), {"available": 3 << 30})
    monkeypatch.setattr(compile_evidence.psutil, "virtual_memory", lambda: free)
    asked = {"compile_modules": ["lab.mma_bf16"], "compile_archs": ["120a"]}
    assert compile_evidence.prepare(Params(**asked, compile_memory_gib=14))[1].limits.memory_bytes == 3 << 30
    assert compile_evidence.prepare(Params(**asked, compile_memory_gib=2))[1].limits.memory_bytes == 2 << 30


def test_a_machine_without_a_compiler_says_so_for_every_job(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_toolchain, "find", lambda: (_ for _ in ()).throw(compile_toolchain.NoToolchain("no nvcc here")))
    p = Params(flashinfer="0.6.15.post1", compile_archs=["120a", "90a"])
    jobs, builder = compile_evidence.prepare(p)
    rows = list(compile_evidence.run(jobs, builder, Stack(), 1))
    assert len(rows) == 2 * len(compile_modules.QUICK)
    assert {(row.verdict, row.reason) for row in rows} == {(Verdict.NOT_RUN, "no nvcc here")}


def flashinfer_tree(root: Path, majors: str = "[12]") -> Path:
    """The parts of a FlashInfer that plan a module."""
    (root / "flashinfer/jit/gemm").mkdir(parents=True)
    (root / "flashinfer/data/csrc").mkdir(parents=True)
    (root / "flashinfer/jit/gemm/core.py").write_text(
        "def gen_gemm_sm120_module_cutlass_fp4():\n    cta_m_n_k_list = [(128, 32, 128), (128, 128, 256)]\n"
        f"    return context.get_nvcc_flags_list(supported_major_versions={majors})\n"
    )
    (root / "flashinfer/data/csrc/fp4_gemm_cutlass_sm120.jinja").write_text(
        "LAUNCH({{ type }}, {{ cta_m }}, {{ cta_n }}, {{ cta_k }}, 1, 1, 1, _1SM, true)\n"
        "LAUNCH({{ type }}, {{ cta_m }}, {{ cta_n }}, {{ cta_k }}, 1, 1, 1, _1SM, false)\n"
    )
    return root


def test_instances_and_targets_are_those_of_the_package(tmp_path):
    name, versions = "flashinfer.fp4_gemm_cutlass_sm120", {"flashinfer": str(flashinfer_tree(tmp_path))}
    jobs, _ = compile_evidence.plan([name], ["120a", "100a"], versions)
    assert [(job.subject, job.verdict) for job in jobs] == [
        (f"compile:{name}:bf16_128x128x256:sm_120a", Verdict.NOT_RUN),
        (f"compile:{name}:sm_100a", Verdict.UNSUPPORTED),
    ]
    assert jobs[1].reason == "flashinfer unknown builds it for compute capability majors (12,) alone"
    assert [label for label, _ in jobs[0].unit.shared_bytes] == ["default_swapped", "streamk_swapped", "default", "streamk"]
    assert "nvfp4lab_shared_bytes_default[flashinfer::gemm::DeviceGemmFp4GemmSm120___nv_bfloat16_128_128_256_1_1_1_1SMfalse" in (
        jobs[0].unit.source
    )
    every, _ = compile_evidence.plan([name], ["120a"], versions, all_units=True)
    assert [job.unit.name for job in every] == ["bf16_128x128x256", "bf16_128x32x128"]
    asked = ["--arch", "120a", "--module", name, "--flashinfer", str(tmp_path)]
    assert jobs[0].repro == shlex.join(["nvfp4lab", "compile", *asked])
    assert every[1].repro == shlex.join(["nvfp4lab", "compile", *asked, "--all-units"])


@pytest.mark.parametrize("flags", [2, 5])
def test_a_whole_marlin_module_is_entered_with_as_many_flags_as_its_version_has(tmp_path, flags, monkeypatch):
    monkeypatch.setattr(compile_toolchain, "tvm_ffi_headers", lambda: [tmp_path])
    header = tmp_path / "sglang/jit_kernel/csrc/gemm/marlin_moe/moe_wna16_marlin.cuh"
    header.parent.mkdir(parents=True)
    names = ", ".join(f"bool kFlag{index}" for index in range(flags))
    header.write_text(
        f"template <typename T>\nvoid other();\ntemplate <typename scalar_t, {names}>\nvoid moe_wna16_marlin_gemm(int a);"
    )
    [job], _ = compile_evidence.plan(["sglang.moe_wna16_marlin"], ["90a"], {"sglang": str(tmp_path)})
    assert f"&moe_wna16_marlin_gemm<nv_bfloat16{', false' * flags}>;" in job.unit.text
    [absent], _ = compile_evidence.plan(["sglang.gptq_marlin"], ["90a"], {"sglang": str(tmp_path)})
    assert (absent.verdict, absent.unit) == (Verdict.NOT_RUN, None)
    assert "no gemm/marlin/gptq_marlin.cuh" in absent.reason


def test_a_module_or_package_that_is_not_there_is_told(tmp_path):
    with pytest.raises(LabError, match="there are lab"):
        compile_evidence.plan(["flashinfer.no_such"], ["120a"], {})
    (tmp_path / "flashinfer").mkdir()
    [job], _ = compile_evidence.plan(["flashinfer.nvfp4_quantize"], ["120a"], {"flashinfer": str(tmp_path)})
    assert (job.verdict, job.unit) == (Verdict.NOT_RUN, None)
    assert "holds no CUDA sources" in job.reason


def test_flashinfer_is_the_one_that_sglang_pins_and_its_absence_stops_no_other_package(tmp_path, monkeypatch):
    names = ["flashinfer.nvfp4_quantize", "lab.mma_bf16"]
    versions = {"sglang": "0.5.23", "flashinfer": None}
    monkeypatch.setattr(compile_sources, "pinned_flashinfer", lambda sglang: str(flashinfer_tree(tmp_path / sglang)))
    jobs, sources = compile_evidence.plan(names, ["120a"], versions)
    assert sources["flashinfer"].root == tmp_path / "0.5.23"
    assert [job.reason for job in jobs] == ["", ""]

    def offline(sglang):
        raise LabError("sglang 0.5.23: no network")

    monkeypatch.setattr(compile_sources, "pinned_flashinfer", offline)
    jobs, _ = compile_evidence.plan(names, ["120a"], versions)
    assert [job.reason for job in jobs] == ["sglang 0.5.23: no network", ""]


def test_the_pin_is_read_from_sglangs_metadata(tmp_path):
    wheel = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    for requirement, pin in (("flashinfer_python[cu13]==0.7.2", "0.7.2"), ("flashinfer-python (==0.6.15.post1)", "0.6.15.post1")):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("sglang/srt/__init__.py", "")
            archive.writestr("sglang-0.5.23.dist-info/METADATA", f"Version: 0.5.23\nRequires-Dist: {requirement}\n")
        assert compile_sources.pinned_flashinfer(str(wheel)) == pin


def test_a_wheel_is_unpacked_once_and_only_what_a_build_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4LAB_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "flashinfer_python-0.7.2-py3-none-any.whl"
    wanted, other = "flashinfer/data/include/flashinfer/a.cuh", "flashinfer/artifacts/huge.bin"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(wanted, "// a")
        archive.writestr(other, "x")
        archive.writestr("flashinfer_python-0.7.2.dist-info/RECORD", f"{wanted},sha256=aa,4\n{other},sha256=bb,1\n")
    sources = compile_sources.locate("flashinfer", str(wheel))
    assert (sources.version, (sources.root / wanted).read_text(), (sources.root / other).exists()) == ("0.7.2", "// a", False)
    (sources.root / wanted).write_text("// kept")
    assert compile_sources.locate("flashinfer", str(wheel)) == sources
    assert (sources.root / wanted).read_text() == "// kept"


def test_sources_of_a_checkout_have_a_digest_of_their_own(tmp_path):
    root = flashinfer_tree(tmp_path)
    before = compile_sources.locate("flashinfer", str(root))
    assert compile_sources.locate("flashinfer", str(root)) == before
    (root / "flashinfer/data/csrc/new.cuh").write_text("//")
    assert compile_sources.locate("flashinfer", str(root)).digest != before.digest


nvcc_here = pytest.mark.skipif(bool(compile_evidence.no_toolchain()), reason=compile_evidence.no_toolchain() or "there is one")


@nvcc_here
def test_a_block_scaled_fp4_instruction_exists_on_sm120_alone(tmp_path, capsys, monkeypatch):
    from nvfp4lab.cli import main

    monkeypatch.setenv("NVFP4LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    probes = ["--module", "lab.mma_block_scaled_fp4", "--module", "lab.tcgen05_block_scaled_fp4"]
    assert main(["compile", "--arch", "120a", "--arch", "100a", "--arch", "90a", *probes, "--json"]) == 0
    rows = [Evidence.from_json(line) for line in capsys.readouterr().out.splitlines()]
    found = {row.subject.removeprefix("compile:lab."): (row.verdict, row.details.get("tensor_instructions")) for row in rows}
    warp, memory = "mma_block_scaled_fp4:m16n8k64", "tcgen05_block_scaled_fp4:cta_group_1"
    assert found[f"{warp}:sm_120a"] == (Verdict.OK, {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 1})
    assert found[f"{memory}:sm_100a"] == (Verdict.OK, {"UTCOMMA.4X": 1})
    refused = {name for name, (verdict, _) in found.items() if verdict is Verdict.UNSUPPORTED}
    assert refused == {f"{warp}:sm_100a", f"{warp}:sm_90a", f"{memory}:sm_120a", f"{memory}:sm_90a"}
    assert {json.loads(row.to_json())["subject"] for row in Ledger("outputs/by_hand/ledger.jsonl")} == {row.subject for row in rows}
