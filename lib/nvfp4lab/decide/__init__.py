"""From evidence to the flags to launch with, a why-not line for every other backend, and when to ask again.

- `gather`       evidence and question from run folders and params files
- `question`     what is asked: which stack, GPU, model; and which evidence speaks about it
- `attribution`  which backends a record really speaks of: what `auto` became, whether a flag reached a layer
- `standing`     what all evidence together says of one backend
- `speeds`       what was measured alike, side by side
- `choice`       the fastest of what was right: by servers, without any by kernels
- `reasons`      why not the others, and where stages contradict each other
- `decision`     all of it in one record
- `display`      how notebook 40 shows it
"""

from nvfp4lab.decide.decision import Decision, decide
from nvfp4lab.decide.question import Question

__all__ = ["Decision", "Question", "decide"]
