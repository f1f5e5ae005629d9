"""The plain loop: one client after the other with torch's own SGD, as short as it can be written."""

from __future__ import annotations

import torch
from jobs import Job, Rounds, main
from torch import Tensor


def run(job: Job, rounds: Rounds, device: str = "cpu") -> dict[str, Tensor]:
    """Rounds of FedAvg."""
    job.use_threads()
    inputs, targets = (part.to(device) for part in job.data())
    model = job.start_model().to(device)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(job.seed)
    for _ in range(job.rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for client in torch.randperm(job.clients, generator=generator)[: job.cohort].tolist():
            model.load_state_dict(state)
            train(job, model, inputs[client], targets[client])
            for name, tensor in model.state_dict().items():
                total[name] += tensor
        state = {name: tensor / job.cohort for name, tensor in total.items()}
        if device == "cuda":
            torch.cuda.synchronize()
        if rounds.done():
            break
    return state


def train(job: Job, model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """A client's epochs."""
    optimiser = torch.optim.SGD(model.parameters(), lr=job.lr)
    batches = list(zip(inputs.split(job.batch_size), targets.split(job.batch_size), strict=True))
    for _ in range(job.epochs):
        for batch, target in batches:
            optimiser.zero_grad()
            job.kind.loss(model(batch), target).backward()
            optimiser.step()


if __name__ == "__main__":
    main(run)
