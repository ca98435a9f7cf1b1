"""The one exception that is shown to a person without a traceback."""


class LabError(Exception):
    """Something the user can act on: the message says what was wrong, where, and what to do.

    `exit_code` follows the batch convention: 1 a real failure, 2 incomplete but resumable, 3 the machine's fault.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code
