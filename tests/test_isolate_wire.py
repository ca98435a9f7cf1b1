"""Frames: what is not whole, ours and intact is never taken for a result."""

import hypothesis
from hypothesis import strategies as st

from nvfp4lab.kernels import isolate_wire
from nvfp4lab.kernels.isolate_device import parse_xids

TOKEN = bytes(range(16))


@hypothesis.given(noise=st.lists(st.binary(max_size=60), min_size=3, max_size=3), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_noise_around_them_and_any_cutting(noise, cuts):
    stream = (
        noise[0] + isolate_wire.pack(TOKEN, "phase", 1) + noise[1] + isolate_wire.pack(TOKEN, "returned", {"a": [1.5]}) + noise[2]
    )
    frames, got, position, turn = isolate_wire.Frames(TOKEN), [], 0, 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        got += frames.feed(stream[position : position + step])
        position, turn = position + step, turn + 1
    assert got == [("phase", 1), ("returned", {"a": [1.5]})]
    assert sum(map(len, noise)) - 15 <= frames.noise_bytes <= sum(map(len, noise))


def test_a_flipped_bit_is_damage():
    frame = bytearray(isolate_wire.pack(TOKEN, "returned", 41))
    frame[-3] ^= 1
    [(kind, reason)] = isolate_wire.Frames(TOKEN).feed(bytes(frame))
    assert (kind, reason) == ("damaged", "checksum of the result does not match")


def test_another_token_is_noise():
    assert isolate_wire.Frames(TOKEN).feed(isolate_wire.pack(bytes(16), "returned", 1)) == []


def test_an_absurd_length_is_damage_and_not_waited_for():
    [(kind, _)] = isolate_wire.Frames(TOKEN).feed(TOKEN + (1 << 40).to_bytes(8, "big") + bytes(4))
    assert kind == "damaged"


def test_xid_lines_are_read_from_a_kernel_log():
    log = "6,1,2,-;usb 1-1: new device\n4,2,3,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=812, name=python, MMU Fault\n"
    assert parse_xids(log) == ("PCI:0000:3b:00: 31, pid=812, name=python, MMU Fault",)
