"""Along which axes an operator can be cut. Each file has the rules of one class of operators, a line for each.

A rule tells of a node of a traced graph its bindings: axes of its operands and of its result that go together, or that
a combiner puts together again. Start with `binding.py`. An operator without a rule cannot be cut.
"""
