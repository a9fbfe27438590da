"""Checkpoints: their layout, and how they are saved and read.

::

    checkpoints/
      step-00001000/
        manifest.json             the content, with the size and digest of every file
        NAME.json                 the values of part NAME that aren't tensors (see `diloco.state_tree`)
        NAME.safetensors          its tensors
        NAME-rank-S.safetensors   the shards of rank S of those that the ranks of a replica share

A checkpoint is written as ``.step-00001000.TOKEN.partial`` next to its final place and renamed when all of it is on
disk. Only then are the oldest checkpoints renamed to ``....deleted`` and deleted. A checkpoint that is saved again is
first renamed to ``....replaced`` and stays loadable until its successor has its name. Every move is a single rename, so
a kill happens either before or after it. Each has a serial number, and the last one is where a run resumes. Only one
process may write to a folder (`lock_folder`); any number may read it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
