"""From evidence to the flags to launch with, a why-not line for every other backend, and when to ask again.

- `question`  what is asked: which stack, GPU, model; and which evidence speaks about it
- `standing`  what all evidence together says of one backend
- `decision`  the choice, the reasons, the contradictions
"""

from nvfp4lab.decide.decision import Decision, decide
from nvfp4lab.decide.question import Question

__all__ = ["Decision", "Question", "decide"]
