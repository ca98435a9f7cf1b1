"""A papermill engine that says what happened.

Stock papermill marks every cell `completed` after the kernel died of a signal or a cell timed out, and leaves
`exception` empty. This engine marks the cell `failed`, later cells `pending`, adds an error output that names the
signal or the limit, and records a verdict in `nb.metadata.nvfp4lab`. Saves are atomic and batched: stock papermill
writes the notebook twice a cell. Redaction happens on the way to disk.

Use it anywhere: `papermill --engine nvfp4lab IN OUT`.
"""

import asyncio
import contextlib
import json
import signal
import time
from pathlib import Path

import nbformat
from jupyter_core.utils import run_sync
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager

from nvfp4lab import atomic
from nvfp4lab.batch.parent_death import die_with_parent
from nvfp4lab.records import Verdict
from nvfp4lab.report.redact import redact_data

SAVE_EVERY_S = 2.0


class LabNotebookManager(NotebookExecutionManager):
    """Execution state of one notebook: batched atomic saves, truthful cell states, the verdict."""

    _saved_at = 0.0

    def save(self, force: bool = False, **_) -> None:
        """Write the notebook if the last write is `SAVE_EVERY_S` old or `force` is set."""
        if self.output_path and (force or time.monotonic() - self._saved_at >= SAVE_EVERY_S):
            write_notebook(self.nb, Path(self.output_path))
            self._saved_at = time.monotonic()
        self.last_save_time = self.now()

    def cell_failed(self, cell, index: int, verdict: Verdict, reason: str, output: dict | None) -> None:
        """Mark `cell` failed; `output` is an error output where the kernel could not write one itself."""
        self.cell_exception(cell, cell_index=index)
        if output is not None:
            cell.outputs.append(nbformat.from_dict(output))
        self.nb.metadata["nvfp4lab_run"] = {"verdict": str(verdict), "reason": reason, "cell": index}

    def cell_complete(self, cell, cell_index=None, **kwargs) -> None:
        """As papermill's, with the cell's outputs redacted before anything is saved."""
        if cell.get("outputs"):
            cell.outputs = [nbformat.from_dict(output) for output in redact_data(cell.outputs)]
        super().cell_complete(cell, cell_index=cell_index, **kwargs)

    def notebook_complete(self, **_) -> None:
        """Final state and save; may be called again. Cells never reached stay `pending`."""
        self.end_time = self.now()
        state = self.nb.metadata.papermill
        state["end_time"] = self.end_time.isoformat()
        state["duration"] = (self.end_time - self.start_time).total_seconds()
        self.nb.metadata.setdefault("nvfp4lab_run", {"verdict": str(Verdict.OK), "reason": "", "cell": None})
        self.cleanup_pbar()
        self.save(force=True)


class LabNotebookClient(PapermillNotebookClient):
    """nbclient with the three ways a cell can end badly told apart: an exception, a dead kernel, a timeout."""

    def papermill_execute_cells(self) -> None:
        """Execute cells in order until one fails; never raises for what a cell did."""
        for index, cell in enumerate(self.nb.cells):
            self.nb_man.cell_start(cell, index)
            try:
                self.execute_cell(cell, index)
            except CellExecutionError as error:
                self.nb_man.cell_failed(cell, index, Verdict.CRASH, f"{error.ename}: {error.evalue}", output=None)
            except DeadKernelError:
                reason = f"the notebook's kernel {self._exit_status()}"
                self.nb_man.cell_failed(cell, index, Verdict.CRASH, reason, _error_output("KernelDied", reason))
            except CellTimeoutError:
                reason = f"the cell ran past its limit of {self.timeout} s and was interrupted"
                self.nb_man.cell_failed(cell, index, Verdict.HANG, reason, _error_output("CellTimeout", reason))
            finally:
                self.nb_man.cell_complete(cell, cell_index=index)
            if cell.metadata.papermill["status"] == self.nb_man.FAILED:
                return

    def execute(self, **kwargs):
        """As papermill's, but the outcome is on disk before the kernel is asked, or waited for, once more.

        The kernel is killed with this process: by itself it would notice a second later, and finish its cell meanwhile.
        """
        self.reset_execution_trackers()
        with self.setup_kernel(preexec_fn=die_with_parent, **kwargs):
            self.papermill_execute_cells()
            self.nb_man.notebook_complete()
            if self.nb.metadata["nvfp4lab_run"]["verdict"] == Verdict.OK:
                with contextlib.suppress(DeadKernelError):  # killed after its last cell: nothing is missing
                    reply = self.wait_for_reply(self.kc.kernel_info())
                    self.nb.metadata["language_info"] = reply["content"]["language_info"]
                self.set_widgets_metadata()
        return self.nb

    def _exit_status(self) -> str:
        async def poll():
            for _ in range(20):  # the process may need a moment to become waitable
                status = await self.km.provisioner.poll() if self.km.provisioner else None
                if status is not None:
                    return status
                await asyncio.sleep(0.05)
            return None

        status = run_sync(poll)()
        if status is None:
            return "stopped answering"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


class LabEngine(NBClientEngine):
    """The engine's face to papermill; registered as `nvfp4lab` by an entry point."""

    @classmethod
    def execute_notebook(
        cls, nb, kernel_name, output_path=None, progress_bar=True, log_output=False, autosave_cell_every=30, **kwargs
    ):
        """Run `nb` and return it; the outcome is in its metadata and, for a failure, in an error output."""
        manager = LabNotebookManager(nb, output_path, log_output, progress_bar, autosave_cell_every)
        nb.metadata.pop("nvfp4lab_run", None)
        manager.notebook_start()
        try:
            cls.execute_managed_notebook(manager, kernel_name, log_output=log_output, **kwargs)
        except BaseException as error:  # what escapes is no cell's doing: the kernel did not start, or we were interrupted
            reason = f"{type(error).__name__}: {error}"
            nb.metadata.setdefault("nvfp4lab_run", {"verdict": str(Verdict.NOT_RUN), "reason": reason, "cell": None})
            raise
        finally:
            manager.notebook_complete()
        return manager.nb

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, start_timeout=60, execution_timeout=None, **kwargs):
        """Run the cells. `execution_timeout`: seconds a cell may take; None: no limit."""
        client = LabNotebookClient(
            nb_man,
            timeout=execution_timeout,
            startup_timeout=start_timeout,
            kernel_name=kernel_name,
            log_output=kwargs.get("log_output", False),
            stdout_file=kwargs.get("stdout_file"),
            stderr_file=kwargs.get("stderr_file"),
            coalesce_streams=True,
            extra_arguments=["--log-level=50"],  # the kernel's own notices would mix with the progress lines
        )
        return client.execute()


def write_notebook(nb, path: Path) -> None:
    """Write `nb` with every string redacted, so that a reader sees the old file or the new one, never half of one."""
    atomic.replace(path, json.dumps(redact_data(nb), ensure_ascii=False, indent=1))


def _error_output(name: str, value: str) -> dict:
    return {"output_type": "error", "ename": name, "evalue": value, "traceback": [f"{name}: {value}"]}
