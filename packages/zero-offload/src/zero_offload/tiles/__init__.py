"""Per kind of value, where its tiles lie and how they move: parameters, gradients, optimizer states."""
