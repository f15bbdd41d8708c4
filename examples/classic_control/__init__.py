"""PPO on Gymnasium's classic control tasks, on the algorithm functions of the language-model trainer."""
