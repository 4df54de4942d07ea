"""stable-baselines3: PPO with an environment that takes its time. Nothing is loaded; rollouts are no validation."""

import time

import gymnasium
import numpy as np
from slow_data import tell
from stable_baselines3 import PPO


class SlowWorld(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 32
        return self.np_random.random(4, dtype=np.float32), {}

    def step(self, action):
        time.sleep(0.008)
        self.left -= 1
        return self.np_random.random(4, dtype=np.float32), float(action), self.left == 0, False, {}


agent = PPO("MlpPolicy", SlowWorld(), n_steps=64, batch_size=16, n_epochs=2, device="cpu", seed=0)
agent.learn(320)
tell(agent._n_updates * 4, None)
