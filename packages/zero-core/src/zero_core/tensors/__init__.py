"""Defines the tensors that stand in for parameters and gradients without memory."""
