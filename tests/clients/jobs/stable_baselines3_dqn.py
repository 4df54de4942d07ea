"""stable-baselines3: DQN with a replay buffer and an evaluation callback."""

import time

import gymnasium
import numpy as np
from slow_data import tell
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import EvalCallback


class SlowWorld(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return self.np_random.random(4, dtype=np.float32), {}

    def step(self, action):
        time.sleep(0.008)
        self.left -= 1
        return self.np_random.random(4, dtype=np.float32), float(action), self.left == 0, False, {}


agent = DQN("MlpPolicy", SlowWorld(), learning_starts=50, train_freq=4, batch_size=16, device="cpu", seed=0)
agent.learn(600, callback=EvalCallback(SlowWorld(), eval_freq=300, n_eval_episodes=2, verbose=0))
tell(agent._n_updates, None)
