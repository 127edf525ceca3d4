"""Any UTF-8 file as characters, for networks that guess the next one; by default Python's help topics."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...compression.errors import ConfigError
from ...stages.meta_watch import META
from .options import check_count, find_text
from .samples import Description, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """One split: sample i is ``length`` characters from i x length on, its target the same, one further."""

    numbers: Tensor  # int64, one per character of the split
    length: int

    in_memory = True

    def __len__(self) -> int:
        return max(len(self.numbers) - 1, 0) // self.length

    def inputs_of(self, indices: Tensor) -> Tensor:
        """Return characters, int64 (batch, length)."""
        return self.numbers[indices.unsqueeze(1) * self.length + torch.arange(self.length)]

    def targets_of(self, indices: Tensor) -> Tensor:
        """Return those that come next, int64 (batch, length)."""
        return self.numbers[indices.unsqueeze(1) * self.length + torch.arange(1, self.length + 1)]

    def form(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a batch of so many samples without memory."""
        both = self.numbers.new_empty((number, self.length), device=META)
        return both, both


def load(*, path: str | None = None, length: int = 64) -> Samples:
    """Return a text file as samples of ``length`` characters, nine tenths to train, the rest to test.

    Args:   path: a UTF-8 file; None for Python's help topics.
    Raises: ConfigError: the file is missing, not UTF-8, or too short for one sample in each split."""
    check_count(data__length=length)
    file = find_text(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"data.path={file} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={file} is not UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from error
    characters, numbers = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
    border = len(text) * 9 // 10
    splits = [Windows(numbers=torch.from_numpy(part), length=length) for part in np.split(numbers, [border])]
    if min(map(len, splits)) < 1:
        raise ConfigError(
            f"data.path={file} has {len(text)} characters, too few for samples of {length} in both splits; "
            f"take a longer file or lower data.length"
        )
    describe = Description(
        num_classes=len(characters), input_shape=(length,), vocabulary="".join(map(chr, characters))
    )
    return Samples(train=splits[0], test=splits[1], describe=describe)
