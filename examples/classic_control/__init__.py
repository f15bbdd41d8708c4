"""PPO on Gymnasium's classic control tasks, with the language-model trainer's algorithm
functions."""
