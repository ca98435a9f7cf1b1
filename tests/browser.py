"""Headless Chromium for tests: what a page requests, logs and shows."""

import dataclasses
import json
import re
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)


@dataclasses.dataclass(frozen=True)
class Visit:
    """requests: network addresses the page asked for; console: its log lines; dom: the page after loading."""

    requests: tuple[str, ...]
    console: tuple[str, ...]
    dom: str
    screenshot: Path


def visit(chromium: str, page: Path, width: int = 900, height: int = 1400, dark: bool = False) -> Visit:
    """Open a local file and look. The screenshot lies beside the page."""
    shot = page.with_suffix(f".{width}{'.dark' if dark else ''}.png")
    with tempfile.TemporaryDirectory() as profile:
        net_log = Path(profile) / "net.json"
        common = [
            chromium,
            *FLAGS.split(),
            f"--user-data-dir={profile}/data",
            f"--window-size={width},{height}",
            "--enable-logging=stderr",
        ]
        if dark:
            common.append("--blink-settings=preferredColorScheme=0")
        log = f"--log-net-log={net_log}"
        dump = subprocess.run([*common, log, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
        subprocess.run([*common, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=120, check=True)
        asked = tuple(_page_requests(net_log))
    console = tuple(line for line in dump.stderr.splitlines() if "CONSOLE" in line)
    return Visit(asked, console, dump.stdout, shot)


def _page_requests(net_log: Path) -> list[str]:
    """http(s) and ws addresses that the page asked for. The browser's own services have no origin as initiator."""
    text = net_log.read_text(errors="replace")
    try:
        events = json.loads(text)["events"]
    except ValueError:  # the log's end is missing when the browser is quick to leave
        events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    starts = [event["params"] for event in events if isinstance(event.get("params"), dict) and "initiator" in event["params"]]
    urls = {start.get("url", "") for start in starts if start["initiator"] != "not an origin"}
    return sorted(url for url in urls if re.match(r"(https?|wss?)://", url))
