"""Deep Q-learning: each worker, or lane, plays and has its own replay memory."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 40
BATCH_SIZE = 64


class Player:
    """Walks to the middle of a line with the network's actions; yields batches of its memory."""

    def __init__(self, model, batch_size):
        self.model, self.batch_size = model, batch_size
        self.position, self.moves = torch.zeros(1), 0
        self.memory = torch.zeros(500, 4)  # position, action, reward, next position

    def __iter__(self):
        return self

    def __next__(self):
        for _ in range(self.batch_size if self.moves == 0 else 4):
            self.play()
        return self.memory[torch.randint(min(self.moves, 500), (self.batch_size,))]

    def play(self):
        action = torch.randint(2, (1,))
        if torch.rand(()) > max(0.1, 1 - self.moves / 200):
            with torch.no_grad():
                action = self.model(self.position[None]).argmax(1)
        position = (self.position + (2 * action - 1) * 0.2).clamp(-1, 1)
        row = torch.cat([self.position, action, -position.abs(), position])
        self.memory[self.moves % 500] = row
        self.moves += 1
        self.position = position if self.moves % 20 else 2 * torch.rand(1) - 1


def make_net():
    return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 2))


def td_loss(model, target, memory):
    positions, actions, rewards, next_positions = memory.split(1, 1)
    values = model(positions).gather(1, actions.long())
    with torch.no_grad():
        goals = rewards + 0.9 * target(next_positions).amax(1, keepdim=True)
    return F.smooth_l1_loss(values, goals)


def main():
    torch.manual_seed(0)
    model, target = DistributedDataParallel(make_net()), make_net()
    target.load_state_dict(model.module.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(dist.get_rank())
    player = Player(model.module, BATCH_SIZE // dist.get_world_size())
    for step in range(1, STEPS + 1):
        memory = next(player)
        loss = td_loss(model, target, memory)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            target.load_state_dict(model.module.state_dict())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
