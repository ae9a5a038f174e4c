"""What holds the weights and takes the optimizer's steps: the policy, its tensors, its use of torch."""
