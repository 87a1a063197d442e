def save_state(*a): raise NotImplementedError
def load_state(*a): raise NotImplementedError
