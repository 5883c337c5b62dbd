"""Who owns which rows of a parameter, and who waits until it is finished."""
