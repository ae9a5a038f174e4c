"""The policy that learns: its weights, its optimizer, its use of torch and of memory."""
