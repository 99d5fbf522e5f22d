"""A model that cannot be cut: two of its values share memory, and one is written into."""

from __future__ import annotations

from torch import Tensor, nn


class Twice(nn.Linear):
    """A module that returns its result twice, once as a view of the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        made = super().forward(x)
        return made, made.view(-1)


class Entangled(nn.Module):
    """A model that writes into a view of the first layer's output after the second layer has used it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            Twice(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x, other = self.first(x)
        y = self.second(x.clone())
        other.mul_(2)
        return self.third(x + y)
