from agentlightning.training.critic.ppo_settings import PPOSettings as PPOSettings
from agentlightning.algorithm.ppo.ppo import PPO as PPO
