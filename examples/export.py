"""A model that calls effops, exported with sizes left open, compiled ahead of time, and run without its Python code."""

import tempfile
from pathlib import Path

import torch

import effops


class NearestDirection(torch.nn.Module):
    """Log density of each point under every direction of a learned set."""

    def __init__(self, components: int, dimension: int) -> None:
        super().__init__()
        self.loc = torch.nn.Parameter(torch.nn.functional.normalize(torch.randn(components, dimension), dim=-1))
        self.scale = torch.nn.Parameter(torch.full((components,), 10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return effops.power_spherical_log_prob(self.loc, self.scale, x.unsqueeze(1))


def main() -> None:
    torch.manual_seed(0)
    model = NearestDirection(components=5, dimension=16).eval()
    points = torch.nn.functional.normalize(torch.randn(7, 16), dim=-1)
    program = torch.export.export(model, (points,), dynamic_shapes={"x": {0: torch.export.Dim("points", min=2)}})
    print([node.target for node in program.graph.nodes if node.op == "call_function"])
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "model.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for count in (7, 1000):
            points = torch.nn.functional.normalize(torch.randn(count, 16), dim=-1)
            assert torch.equal(compiled(points), model(points))
    print("the package computes the same bits")


if __name__ == "__main__":
    main()
