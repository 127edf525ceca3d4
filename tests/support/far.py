"""A store as far away as a disk: what it keeps is no tensor, and it lends a buffer that it uses again."""

import threading

import torch

from penstock.compression.buffers import Frame
from penstock.stages.memory import evictable_tensor
from penstock.stages.memory.stores import Store, UnpooledBuffers


def small_pieces(patch):
    """Keep small tensors in several pieces as well, which only large ones are else."""
    patch.setattr(evictable_tensor, "piece_bytes", lambda size: min(size, max(256, -(-size // 192) * 64)))


class AwayStore(Store):
    """Takes every frame, smaller or not, as the memory of another device would."""

    @property
    def takes_pieces(self):
        return True

    def offloads_from(self, device):
        return True


class FarStore(AwayStore):
    """Frames leave memory with ``put``; what ``get`` lent a thread is overwritten by its next one."""

    def __init__(self):
        super().__init__()
        self.kept, self.buffers, self.num_puts = {}, UnpooledBuffers(), 0
        self.threads = threading.local()

    def put(self, key, frame):
        assert key not in self.kept, "a key is dropped before it is put again"
        self.kept[key] = frame.bytes.contiguous().numpy().tobytes()
        self._num_bytes[key] = frame.num_bytes
        self.num_puts += 1
        frame.release()

    def get(self, key):
        kept = torch.frombuffer(bytearray(self.kept[key]), dtype=torch.uint8)
        lent = getattr(self.threads, "lent", torch.empty(0, dtype=torch.uint8))
        lent.fill_(0xAB)  # whoever kept what was lent reads this
        if len(lent) < len(kept):
            lent = torch.empty(len(kept), dtype=torch.uint8)
        lent[: len(kept)] = kept
        self.threads.lent = lent
        return Frame(lent, len(kept), self.buffers)

    def drop(self, key):
        self.kept.pop(key, None)
        self._num_bytes.pop(key, None)
