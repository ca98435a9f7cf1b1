"""One pass over a server log: which known troubles it shows, which exceptions nobody knows, and what the server recovered from."""

import collections
import dataclasses
import re

from nvfp4lab.server import logs_lines, logs_signatures
from nvfp4lab.server.logs_lines import Line, Message
from nvfp4lab.server.logs_signatures import Signature

READY = re.compile(r"The server is fired up and ready to roll|Application startup complete|Uvicorn running on ")
PROGRESS = re.compile(
    r"^(Decode|Prefill) batch\b|'(POST|GET) /\S* HTTP/[\d.]+' 200|^(Engine \d+: )?Avg (prompt|generation) throughput"
)
LAUNCH = re.compile(r"\bserver_args=|^ServerArgs\(|^(non-default|engine) args:|^Initializing a V\d|^args: Namespace\(")
# Text of users, not of the server: what was asked is skipped, what was answered is searched for repeated tokens alone.
ASKED = re.compile(r"^(Receive: |Received request )|^\S*GenerateReqInput\(")
ANSWERED = re.compile(
    r"^Finish: .*?\bout=|'(text|output_text|content|generated_text|reasoning_content)': ?'"
    r"|^(Output|output|Generated text|Response): "
)
HARMLESS = re.compile(
    r"^Ignore import error when loading|\b(Deprecation|Future|User|Runtime|Resource|Syntax)Warning\b|HTTP/[\d.]+' \d{3}"
    r"|\b(0|no) (errors?|failures?|nans?)\b|\b([Ii]gnor(ed|ing)|[Rr]etrying)\b"
    r"|(?i:(relative|absolute|max|mean|rms|quanti[sz]ation) error)"
)
TRACEBACK = re.compile(r"Traceback \(most recent call last\):")
CHAINED = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")
EXCEPTION = re.compile(r"([a-z_]\w*\.)*[A-Z]\w*(Error|Exception): \S")
RAISED = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # how the last line of a traceback begins, whatever the exception is called
CONSEQUENCE = re.compile(
    r"^(SystemExit|KeyboardInterrupt|EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|(\w+\.)*CancelledError"
    r"|(\w+\.)*ChildFailedError|(\w+\.)*ProcessExitedException)"
    r"|Rank \d+ scheduler (is dead|died)|[Rr]eceived sigquit"
    r"|[Ss]cheduler hit an exception|Please check if there are relevant logs|EngineDeadError|Engine core (proc|initialization) \w+"
    r"|Received SIG|died (unexpectedly )?with exit|Initialization failed\. "
)
DIED = re.compile(
    r"[Rr]eceived sigquit from a child|[Ss]cheduler hit an exception|Rank \d+ scheduler (is dead|died)|Segmentation fault"
    r"|core dumped|\bAborted\b|^Killed\b|Fatal Python error|terminate called|EngineDeadError|Engine core initialization failed"
    r"|(exited|died|terminated)( unexpectedly)? with (exit ?)?(code|exitcode) ?-?[1-9]"
)
PHASES = (
    ("capture", re.compile(r"Capture (cuda|CUDA|piecewise)|Capturing (batches|cuda|CUDA)|Compiling num tokens")),
    ("load", re.compile(r"Load weight begin|Loading (safetensors|pt|model)|Starting to load model|Init torch distributed")),
)
LOAD_FRAME = re.compile(
    r"load_model|load_weights|weight_loader|process_weights_after_loading|create_weights|get_quant_(method|config)|from_config"
)
CALM_LEVELS = frozenset({"DEBUG", "INFO", "WARNING"})
MESSAGE_LINES = 12  # how far the text of an exception may go on
RECOVERED_AFTER = 5  # batches: the ranks that still live print a few after one has failed
MEMO_LINES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the log as a person would read it."""

    number: int
    line: str


@dataclasses.dataclass
class Finding:
    """The first line of one signature since the server last made progress, and how often it came."""

    signature: Signature
    place: Place
    groups: dict[str, str | None]
    phase: str
    in_exception: bool
    literal: bool
    calm: bool
    count: int = 1
    recovered: bool = False


@dataclasses.dataclass
class Run:
    """What one start of the server said.

    unknown: an exception that no signature knows; error: a line logged as an error that none knows; consequence: what other
    processes said about the failure.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    unknown: Place | None = None
    error: Place | None = None
    consequence: Place | None = None
    ready: Place | None = None
    died: bool = False
    phase: str = "import"
    arguments: str = ""

    @property
    def failed(self) -> bool:
        """Whether anything in it says failure."""
        return self.died or self.unknown is not None or any(not item.recovered for item in self.findings)

    def recover(self) -> None:
        """The server goes on: what it can recover from was no failure."""
        self.unknown = self.error = self.consequence = None
        self.died = False
        for finding in self.findings:
            finding.recovered = finding.recovered or not finding.signature.sticky


class Reader:
    """State of the pass. Feed it every line; then `runs` holds the starts of the server in the order of the log."""

    def __init__(self):
        self.runs = [Run()]
        self.last: Line | None = None
        self._frames: collections.deque[str] | None = None  # not None: inside a traceback
        self._message_lines = self._foreign_lines = 0
        self._chained = False
        self._batches = 0
        self._silent: set[bytes] = set()
        self._batch_lines: set[bytes] = set()

    @property
    def run(self) -> Run:
        return self.runs[-1]

    @property
    def ends_in_traceback(self) -> bool:
        """Whether the log was cut before a traceback said what was raised."""
        return self._frames is not None

    def feed(self, line: Line) -> None:
        """Take one line in. A line whose like, numbers aside, has said nothing before is not searched again."""
        self.last = line
        key = re.sub(rb"\d\d+", b"0", line.raw) if len(line.raw) <= 512 else None
        if self._frames is None and not self._message_lines:
            if key in self._silent:
                return
            if key in self._batch_lines:
                self._progress()
                return
        clean = line.clean()
        if not clean.strip():
            return
        message = logs_lines.message(logs_signatures.normal_quotes(clean))
        said = self._take(Place(line.number, clean), message)
        if key and not said and len(self._silent) < MEMO_LINES:
            self._silent.add(key)
        if key and said == "batch" and len(self._batch_lines) < MEMO_LINES:
            self._batch_lines.add(key)

    def _take(self, place: Place, message: Message) -> str | None:
        """Use one line; None when it said nothing, so that its like may be skipped."""
        text = message.text
        if LAUNCH.search(text):
            self._launch(text)
            return "launch"
        if READY.search(text):
            self.run.ready, self.run.phase = place, "run"
            self._leave_traceback()
            self.run.recover()
            return "ready"
        if PROGRESS.search(text):
            self.run.ready, self.run.phase = self.run.ready or place, "run"
            self._progress()
            return "batch"
        if ASKED.search(text):
            return None
        answered = ANSWERED.search(text)
        if answered:
            return self._search(place, message, text[answered.end() :], answer=True)
        return self._traceback(place, message) or self._plain(place, message)

    def _launch(self, text: str) -> None:
        if self.run.failed or self.run.ready:
            self.runs = [*self.runs[-1:], Run()]
        self.run.arguments = text[:20000]
        self._leave_traceback()

    def _progress(self) -> None:
        run = self.run
        if run.unknown or run.error or run.died or run.findings:
            self._batches += 1
            if self._batches >= RECOVERED_AFTER and not run.died:
                run.recover()

    def _leave_traceback(self) -> None:
        self._frames, self._message_lines, self._chained = None, 0, False

    def _traceback(self, place: Place, message: Message) -> str | None:
        """Handle the lines of a traceback and of the exception at its end."""
        text = message.text
        if TRACEBACK.search(text):
            self.run.died = self.run.died or bool(DIED.search(text))
            self._frames = collections.deque(maxlen=64)
            self._message_lines = self._foreign_lines = 0
            return "traceback"
        if CHAINED.search(text):
            self._chained = True
            return "traceback"
        if self._frames is None:
            return None
        if message.indented or text.startswith(("~", "^")):
            self._frames.append(text)
            return self._search(place, message, text, answer=False, frame=True) or "traceback"
        if not RAISED.match(text) and self._foreign_lines < MESSAGE_LINES:
            return self._foreign(place, message)
        self._message_lines = MESSAGE_LINES
        said = self._search(place, message, text, answer=False)
        self._end_of_traceback(place, text, known=said is not None)
        return "exception"

    def _foreign(self, place: Place, message: Message) -> str:
        """A line that another rank wrote into the traceback of this one, which goes on behind it."""
        self._foreign_lines += 1
        frames, self._frames = self._frames, None
        said = self._plain(place, message)
        self._frames = frames
        return said or "traceback"

    def _end_of_traceback(self, place: Place, text: str, known: bool) -> None:
        self._frames = None
        self._batches = 0
        if known:
            if self._chained:
                self.run.unknown = None  # the exception that followed from it is one we know
        elif CONSEQUENCE.search(text):
            self.run.consequence = self.run.consequence or place
        else:
            self.run.unknown = self.run.unknown or place
        self._chained = False

    def _plain(self, place: Place, message: Message) -> str | None:
        """A line outside a traceback."""
        text = message.text
        for phase, pattern in PHASES:
            if self.run.phase != "run" and pattern.search(text):
                self.run.phase = phase
        died = bool(DIED.search(text))
        self.run.died = self.run.died or died
        said = self._search(place, message, text, answer=False)
        self._message_lines = max(0, self._message_lines - 1)
        if said:
            return said
        if CONSEQUENCE.search(text) or died:
            self.run.consequence = self.run.consequence or place
            return "consequence"
        if EXCEPTION.match(text) and message.level not in CALM_LEVELS:
            self._batches = 0
            self.run.unknown = self.run.unknown or place  # printed without its traceback
            return "exception"
        if message.level in ("ERROR", "CRITICAL", "FATAL") and not HARMLESS.search(text):
            self.run.error = self.run.error or place
            return "error"
        return None

    def _search(self, place: Place, message: Message, text: str, *, answer: bool, frame: bool = False) -> str | None:
        """Look for signatures; the best of one line is kept. A frame of a traceback counts when it is an assertion."""
        if HARMLESS.search(text):
            return None
        matched = [
            (signature, found)
            for signature in logs_signatures.load()
            if signature.output_text == answer and (found := signature.pattern.search(text)) and self._fits(signature)
        ]
        if frame:
            asserted = text.lstrip().startswith("assert ") or logs_signatures.is_literal(text)
            matched = [(signature, found) for signature, found in matched if asserted and signature.rank == "root"]
        if not matched:
            return None
        matched = [item for item in matched if item[0].swallows] or matched
        signature, found = min(matched, key=lambda item: (("root", "general", "notice").index(item[0].rank), item[0].order))
        self._keep(signature, place, found.groupdict(), message)
        return "finding"

    def _fits(self, signature: Signature) -> bool:
        if signature.needs != "load":
            return True
        return self.run.phase == "load" or any(LOAD_FRAME.search(frame) for frame in self._frames or ())

    def _keep(self, signature: Signature, place: Place, groups: dict[str, str | None], message: Message) -> None:
        self._batches = 0
        literal = logs_signatures.is_literal(message.text)
        in_exception = self._frames is not None or self._message_lines > 0 or message.level in ("ERROR", "CRITICAL", "FATAL")
        calm = message.level in CALM_LEVELS and not in_exception
        for earlier in self.run.findings:
            if earlier.signature is signature and earlier.recovered is False and (earlier.literal or not literal):
                earlier.count += 1
                earlier.calm = earlier.calm and calm
                return
        self.run.findings.append(Finding(signature, place, groups, self.run.phase, in_exception, literal, calm))
