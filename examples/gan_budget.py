"""A generator and a discriminator with an optimizer each, and a memory budget: three more lines."""

import torch
from torch import nn

import pipefit  # 1


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Make a network of four layers."""
    hidden = [nn.Sequential(nn.Linear(size, 64), nn.GELU()) for size in (inputs, 64, 64)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


torch.manual_seed(0)
generator, discriminator = network(8, 2), network(2, 1)
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
loss_of = nn.functional.binary_cross_entropy_with_logits


def train_step(real: torch.Tensor) -> torch.Tensor:
    """Train the discriminator, then the generator; return the generator's loss."""
    fake = generator(torch.randn(len(real), 8))
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    of_discriminator.zero_grad()
    (loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros)).backward()
    of_discriminator.step()
    of_generator.zero_grad()
    loss = loss_of(discriminator(fake), ones)
    loss.backward()
    of_generator.step()
    return loss


both, optimizers = nn.ModuleList([generator, discriminator]), [of_generator, of_discriminator]
handle = pipefit.apply(
    both, budget="2 MiB", batch=torch.ones(512, 2), optimizer=optimizers, step=train_step
)  # 2
print(handle)  # 3
for step in range(8):
    real = torch.randn(512, 1).sin() * torch.ones(2)
    print(f"step {step}: loss {train_step(real):.6f}")
