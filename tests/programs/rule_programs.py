"""For each row of the table of rules a small program that uses it, of tensors of real sizes."""

import inspect

import torch

aten = torch.ops.aten
SIZES = 40, 48, 36


def tensors():
    """The arguments of programs, by their names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    def below(limit, *shape):
        return torch.randint(limit, shape, generator=generator)

    floats = {
        "x": random(*SIZES),
        "y": random(*SIZES),
        "row": random(SIZES[2]),
        "column": random(SIZES[1], 1),
        "square": random(40, 40, 40),
        "left": random(300, 64),
        "right": random(64, 280),
        "lefts": random(20, 70, 40),
        "rights": random(20, 40, 60),
        "added": random(280),
        "addeds": random(20, 1, 60),
        "points": random(4, 120, 5),
        "sources": random(4, 130, 5),
        "vector": random(400),
        "matrix": random(300, 400),
        "long": random(90_000),
        "longer": random(90_000),
        "images": random(24, 3, 40, 40),
        "filters": random(5, 3, 3, 3),
        "grids": random(24, 40, 40, 2).tanh(),
        "words": random(200, 64),
        "signals": random(40, 24, 96),
        "volumes": random(8, 3, 16, 16, 16),
        "fields": random(8, 16, 16, 16, 3).tanh(),
        "matrices": random(900, 8, 8),
        "rows": random(60, 48, 36),
    }
    return {name: one.requires_grad_() for name, one in floats.items()} | {
        "index": below(36, *SIZES),
        "short_index": below(36, 30, 40, 36),
        "numbers": below(40, 60),
        "more_numbers": below(48, 60),
        "pair_numbers": below(40, 300, 60),
        "text": below(200, 30, 40),
        "bits": below(2, *SIZES).bool(),
        "seldom": below(3000, *SIZES) == 0,
        "mostly": below(3000, *SIZES) != 0,
    }


def arguments(function):
    """Those that a program names."""
    given = tensors()
    return [given[name] for name in inspect.signature(function).parameters]


def _positive(matrices):
    return matrices @ matrices.mT + 4 * torch.eye(8)


def _factors(matrices):
    return aten.linalg_lu_factor_ex(_positive(matrices))[:2]


PROGRAMS = {
    # elementwise
    "clone.default": lambda x: aten.clone(x.sin()),
    "_to_copy.default": lambda x: aten._to_copy(x.sin(), dtype=torch.float64),
    "detach.default": lambda x: x.sin() * aten.detach(x.cos()),
    "alias.default": lambda x: aten.alias(x.sin()),
    "lift_fresh_copy.default": lambda x: aten.lift_fresh_copy(x.sin()),
    "zeros_like.default": lambda x: x.sin() + aten.zeros_like(x),
    "ones_like.default": lambda x: x.sin() + aten.ones_like(x.cos()),
    "full_like.default": lambda x: x.sin() + aten.full_like(x.cos(), 0.5),
    "empty_like.default": lambda x: x.sin() + aten.fill(aten.empty_like(x), 2.0),
    "fill.Scalar": lambda x: x.sin() + aten.fill(x.cos(), 2.0),
    "masked_fill.Scalar": lambda x, y: aten.masked_fill(x.sin(), y > 0, 0.5),
    "masked_fill.Tensor": lambda x, y: aten.masked_fill(x.sin(), y > 0, torch.tensor(0.5)),
    "where.self": lambda x, y, row, column: aten.where(row > 0, x.sin(), y * column),
    "polar.default": lambda x, y: aten.polar(x.exp(), y.cos()).real,
    "complex.default": lambda x, y: aten.complex(x.sin(), y.cos()).abs(),
    "full.default": lambda x: x.sin() + aten.full([40, 48, 36], 0.5),
    "ones.default": lambda x: x.sin() + aten.ones([40, 48, 36]),
    "zeros.default": lambda x: x.sin() + aten.zeros([40, 48, 36]),
    "new_full.default": lambda x: x.sin() + aten.new_full(x.cos(), [40, 48, 36], 0.5),
    "new_ones.default": lambda x: x.sin() + aten.new_ones(x.cos(), [40, 48, 36]),
    "new_zeros.default": lambda x: x.sin() + aten.new_zeros(x.cos(), [40, 48, 36]),
    "mul.Tensor": lambda x, y, row: (x.sin() + row) * y.cos(),  # by its tag
    "add.Tensor": lambda x, row, column: x.sin() + row * column,
    "gt.Tensor": lambda x, y: x.sin() > y,
    "lerp.Tensor": lambda x, y, row: aten.lerp(x.sin(), y, row),
    "addcmul.default": lambda x, row, column: aten.addcmul(x, row, column),
    # view
    "diagonal.default": lambda square: aten.diagonal(square.sin(), 0, 0, 2) * aten.ones([40, 40, 40]),
    "split.Tensor": lambda x: aten.split(x.sin(), 24, 1),
    "split_with_sizes.default": lambda x: aten.split_with_sizes(x.sin(), [12, 24, 12], 1),
    "chunk.default": lambda x: aten.chunk(x.sin(), 4, 1),
    "unbind.int": lambda images: aten.unbind(images.sin(), 1),
    "conj.default": lambda x, y: aten.conj(aten.complex(x, y)) * aten.complex(y, x),
    "_conj.default": lambda x, y: aten._conj(aten.complex(x, y)) * aten.complex(y, x),
    "unfold.default": lambda x: aten.unfold(x.sin(), 1, 8, 8),
    "view.default": lambda x: aten.view(x.sin(), [1920, 36]),
    "_unsafe_view.default": lambda x: aten._unsafe_view(x.sin(), [40, 6, 8, 36]),
    "reshape.default": lambda x: aten.reshape(x.sin(), [40, 6, 8 * 36]),
    "expand.default": lambda row, column: aten.expand((row * column).sin(), [40, 48, 36]),
    "unsqueeze.default": lambda x, y: aten.unsqueeze(x.sin(), 1),
    "squeeze.dim": lambda images: aten.squeeze(images.sum(1, keepdim=True).sin(), 1),
    "squeeze.dims": lambda images: aten.squeeze(images.sum(1, keepdim=True).sin(), [1, 2]),
    "permute.default": lambda x: aten.permute(x.sin(), [2, 0, 1]),
    "transpose.int": lambda square: aten.transpose(square.sin(), 0, 2),
    "t.default": lambda matrix: aten.t(matrix.sin()),
    "select.int": lambda images: aten.select(images.sin(), 1, 2),
    "slice.Tensor": lambda x: aten.slice(x.sin(), 1, 0, 48, 2),
    # reduction
    "sum.default": lambda x, y: aten.sum((x - y).sin()),
    "sum.dim_IntList": lambda x, y: aten.sum((x - y).sin(), [1]),
    "amax.default": lambda x, y: aten.amax((x - y).sin(), [1]),
    "amin.default": lambda x, y: aten.amin((x - y).sin(), [1, 2]),
    "any.dim": lambda x, y: aten.any((x - y) > 2.5, 1),
    "any.dims": lambda seldom, bits: aten.any(seldom & bits, [1]),
    "any.default": lambda seldom, bits: aten.any(seldom & bits),
    "all.dim": lambda x, y: aten.all((x - y) < 2.5, 1),
    "all.dims": lambda mostly, bits: aten.all(mostly | bits, [1]),
    "all.default": lambda mostly, bits: aten.all(mostly | bits),
    "logsumexp.default": lambda x, y: aten.logsumexp((x - y).sin(), [1]),
    "linalg_vector_norm.default": lambda x, y: aten.linalg_vector_norm((x - y).sin(), 2, [1]),
    "prod.dim_int": lambda x, y: aten.prod((0.02 * (x - y)).exp(), 1),
    "argmin.default": lambda x, y: aten.argmin((x - y).sin(), 1),
    "argmax.default": lambda x, y: aten.argmax((x - y).sin(), 1),
    "max.dim": lambda x, y: aten.max((x - y).sin(), 1),
    "min.dim": lambda x, y: aten.min((x - y).sin(), 1),
    "median.dim": lambda x, y: aten.median((x - y).sin(), 1),
    "nanmedian.dim": lambda x, y: aten.nanmedian((x - y).sin(), 1),
    "mode.default": lambda x, y: aten.mode((x - y).round(), 1),
    "kthvalue.default": lambda x, y: aten.kthvalue((x - y).sin(), 5, 1),
    "count_nonzero.dim_IntList": lambda x, y: aten.count_nonzero((x - y) > 1, [1]),
    "std.correction": lambda x, y: aten.std.correction((x - y).sin(), [1]),
    "var_mean.correction": lambda x, y: aten.var_mean.correction((x - y).sin(), [1]),
    "std_mean.correction": lambda x, y: aten.std_mean.correction((x - y).sin(), [1]),
    "var.correction": lambda x, y: aten.var.correction(aten.complex(x, y).sin(), [1]),
    "mean.dim": lambda x, y: aten.mean(aten.complex(x, y).sin(), [1]),
    # product
    "convolution.default": lambda images, filters: aten.convolution(
        images.sin(), filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    ),
    "grid_sampler_2d.default": lambda images, grids: aten.grid_sampler_2d(images.sin(), grids, 0, 0, False),
    "contracted": lambda points, sources: (points[:, :, None] * sources[:, None]).sum(-1).sin(),
    "contracted over pairs": lambda left, right: (left[:, None] * left).sum((0, 1)).sin(),
    "mm.default": lambda left, right: aten.mm(left.sin(), right),
    "mm.default of large factors": lambda matrix, vector: aten.mm(matrix.sin(), aten.t(matrix)[:, :40]),
    "bmm.default": lambda lefts, rights: aten.bmm(lefts.sin(), rights),
    "bmm.default of large factors": lambda lefts, rights: aten.bmm(lefts.sin(), rights[:, :, :2]),
    "addmm.default": lambda added, left, right: aten.addmm(added, left.sin(), right),
    "baddbmm.default": lambda addeds, lefts, rights: aten.baddbmm(addeds, lefts.sin(), rights),
    "addbmm.default": lambda added, lefts, rights: aten.addbmm(added[:60], lefts.sin(), rights),
    "mv.default": lambda matrix, vector: aten.mv(matrix.sin(), vector),
    "dot.default": lambda long, longer: aten.dot(long.sin(), longer) / 300,
    "_cdist_forward.default": lambda points, sources: aten._cdist_forward(points, sources.sin(), 2.0, None),
    "_euclidean_dist.default": lambda points, sources: aten._euclidean_dist(points, sources.sin()),
    "grid_sampler_3d.default": lambda volumes, fields: aten.grid_sampler_3d(volumes.sin(), fields, 0, 0, False),
    # linalg
    "linalg_pinv.atol_rtol_tensor": lambda matrices: aten.linalg_pinv.atol_rtol_tensor(_positive(matrices)),
    "_linalg_solve_ex.default": lambda matrices: aten._linalg_solve_ex(_positive(matrices), matrices)[0],
    "linalg_cholesky_ex.default": lambda matrices: aten.linalg_cholesky_ex(_positive(matrices))[0],
    "linalg_inv_ex.default": lambda matrices: aten.linalg_inv_ex(_positive(matrices))[0],
    "_linalg_det.default": lambda matrices: aten._linalg_det(matrices.sin())[0],
    "_linalg_slogdet.default": lambda matrices: aten._linalg_slogdet(matrices.sin())[:2],
    "_linalg_svd.default": lambda matrices: aten._linalg_svd(matrices.sin())[1],
    "_linalg_eigh.default": lambda matrices: aten._linalg_eigh(_positive(matrices))[0],
    "_linalg_eigvals.default": lambda matrices: aten._linalg_eigvals(matrices.detach().sin()).abs(),
    "linalg_eigvals.default": lambda matrices: aten.linalg_eigvals(matrices.detach().sin()).abs(),
    "linalg_qr.default": lambda matrices: aten.linalg_qr(_positive(matrices)),
    "linalg_lu.default": lambda matrices: aten.linalg_lu(_positive(matrices)),
    "linalg_lu_factor_ex.default": lambda matrices: _factors(matrices),
    "linalg_lu_solve.default": lambda matrices: aten.linalg_lu_solve(*_factors(matrices), matrices),
    "linalg_solve_triangular.default": lambda matrices: aten.linalg_solve_triangular(
        _positive(matrices), matrices, upper=False
    ),
    "linalg_matrix_exp.default": lambda matrices: aten.linalg_matrix_exp(matrices.sin() / 4),
    "linalg_householder_product.default": lambda matrices: aten.linalg_householder_product(
        matrices.sin(), matrices[:, 0].sin()
    ),
    "triangular_solve.default": lambda matrices: aten.triangular_solve(matrices, _positive(matrices)),
    "cholesky.default": lambda matrices: aten.cholesky(_positive(matrices)),
    "cholesky_solve.default": lambda matrices: aten.cholesky_solve(matrices, _positive(matrices)),
    "cholesky_inverse.default": lambda matrices: aten.cholesky_inverse(_positive(matrices)),
    "lu_unpack.default": lambda matrices: aten.lu_unpack(*_factors(matrices)),
    "geqrf.default": lambda matrices: aten.geqrf(matrices.detach().sin()),
    "ormqr.default": lambda matrices: aten.ormqr(*aten.geqrf(matrices.detach().sin()), matrices.detach()),
    # image
    "max_pool2d_with_indices_backward.default": lambda images: aten.max_pool2d_with_indices_backward(
        images.detach()[:, :, ::2, ::2].sin(),
        images.detach(),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        aten.max_pool2d_with_indices(images.detach(), [2, 2])[1],
    ),
    "max_unpool2d.default": lambda images: aten.max_unpool2d(
        *aten.max_pool2d_with_indices(images.sin(), [2, 2]), images.shape[2:]
    ),
    "max_unpool3d.default": lambda volumes: aten.max_unpool3d(
        *aten.max_pool3d_with_indices(volumes.sin(), [2, 2, 2]), volumes.shape[2:], [2, 2, 2], [0, 0, 0]
    ),
    "avg_pool2d.default": lambda images: aten.avg_pool2d(images.sin(), [3, 3], [1, 1], [1, 1]),
    "avg_pool3d.default": lambda volumes: aten.avg_pool3d(volumes.sin(), [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    "max_pool2d_with_indices.default": lambda images: aten.max_pool2d_with_indices(images.sin(), [2, 2]),
    "max_pool3d_with_indices.default": lambda volumes: aten.max_pool3d_with_indices(volumes.sin(), [2, 2, 2]),
    "_adaptive_avg_pool2d.default": lambda images: aten._adaptive_avg_pool2d(images.sin(), [30, 20]),
    "_adaptive_avg_pool3d.default": lambda volumes: aten._adaptive_avg_pool3d(volumes.sin(), [8, 10, 12]),
    "adaptive_max_pool2d.default": lambda images: aten.adaptive_max_pool2d(images.sin(), [30, 20]),
    "adaptive_max_pool3d.default": lambda volumes: aten.adaptive_max_pool3d(volumes.sin(), [8, 10, 12]),
    "reflection_pad1d.default": lambda signals: aten.reflection_pad1d(signals.sin(), [48, 48]),
    "reflection_pad2d.default": lambda images: aten.reflection_pad2d(images.sin(), [2, 2, 20, 20]),
    "reflection_pad3d.default": lambda volumes: aten.reflection_pad3d(volumes.sin(), [2, 2, 2, 2, 8, 8]),
    "replication_pad1d.default": lambda signals: aten.replication_pad1d(signals.sin(), [48, 48]),
    "replication_pad2d.default": lambda images: aten.replication_pad2d(images.sin(), [2, 2, 20, 20]),
    "replication_pad3d.default": lambda volumes: aten.replication_pad3d(volumes.sin(), [2, 2, 2, 2, 8, 8]),
    "upsample_linear1d.default": lambda signals: aten.upsample_linear1d(signals.sin(), [192], False),
    "upsample_bilinear2d.default": lambda images: aten.upsample_bilinear2d(images.sin(), [80, 50], False),
    "upsample_bicubic2d.default": lambda images: aten.upsample_bicubic2d(images.sin(), [80, 50], False),
    "upsample_trilinear3d.default": lambda volumes: aten.upsample_trilinear3d(volumes.sin(), [32, 20, 16], False),
    "upsample_nearest1d.default": lambda signals: aten.upsample_nearest1d(signals.sin(), [192]),
    "upsample_nearest2d.default": lambda images: aten.upsample_nearest2d(images.sin(), [80, 50]),
    "upsample_nearest3d.default": lambda volumes: aten.upsample_nearest3d(volumes.sin(), [32, 20, 16]),
    "_upsample_nearest_exact1d.default": lambda signals: aten._upsample_nearest_exact1d(signals.sin(), [192]),
    "_upsample_nearest_exact2d.default": lambda images: aten._upsample_nearest_exact2d(images.sin(), [80, 50]),
    "_upsample_nearest_exact3d.default": lambda volumes: aten._upsample_nearest_exact3d(volumes.sin(), [32, 20, 16]),
    "_upsample_bilinear2d_aa.default": lambda images: aten._upsample_bilinear2d_aa(images.sin(), [80, 50], False),
    "_upsample_bicubic2d_aa.default": lambda images: aten._upsample_bicubic2d_aa(images.sin(), [80, 50], False),
    "pixel_shuffle.default": lambda signals: aten.pixel_shuffle(signals.sin().reshape(40, 24, 12, 8), 2),
    "pixel_unshuffle.default": lambda images: aten.pixel_unshuffle(images.sin(), 2),
    "im2col.default": lambda images: aten.im2col(images.sin(), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im.default": lambda signals: aten.col2im(signals.sin(), [9, 13], [2, 2], [1, 1], [0, 0], [1, 1]),
    # scan
    "linalg_cross.default": lambda x, y: aten.linalg_cross(x.sin()[:, :3], y[:, :3], dim=1),
    "renorm.default": lambda x: aten.renorm(x.sin(), 2, 1, 3.0),
    "_fft_r2c.default": lambda x: aten._fft_r2c(x.sin(), [1], 0, True).abs(),
    "_fft_c2r.default": lambda x, y: aten._fft_c2r(aten.complex(x, y).sin(), [1], 0, 94),
    "_fft_c2c.default": lambda x, y: aten._fft_c2c(aten.complex(x, y).sin(), [1], 0, True).abs(),
    "roll.default": lambda x: aten.roll(x.sin(), [5], [1]),
    "cummax.default": lambda x: aten.cummax(x.sin(), 1),
    "cummin.default": lambda x: aten.cummin(x.sin(), 1),
    "_softmax.default": lambda x: aten._softmax(x.sin(), 1, False),
    "_safe_softmax.default": lambda x: aten._safe_softmax(x.sin(), 1),
    "_log_softmax.default": lambda x: aten._log_softmax(x.sin(), 1, False),
    "cumsum.default": lambda x: aten.cumsum(x.sin(), 1),
    "cumprod.default": lambda x: aten.cumprod(1 + x.sin() / 8, 1),
    "logcumsumexp.default": lambda x: aten.logcumsumexp(x.sin(), 1),
    "flip.default": lambda x: aten.flip(x.sin(), [1]),
    "topk.default": lambda x: aten.topk(x.sin(), 16, 1),
    "sort.default": lambda x: aten.sort(x.sin(), 1),
    "sort.stable": lambda x: aten.sort.stable(x.sin(), stable=True, dim=1),
    "native_layer_norm.default": lambda x, row: aten.native_layer_norm(x.sin(), [36], row, None, 1e-5),
    # index
    "constant_pad_nd.default": lambda x: aten.constant_pad_nd(x.sin(), [0, 0, 24, 24], 0.5),
    "gather.default": lambda x, index: aten.gather(x.sin(), 1, index),
    "gather.default of fewer": lambda x, short_index: aten.gather(x.sin(), 1, short_index),
    "index_select.default": lambda x, numbers: aten.index_select(x.sin(), 1, numbers),
    "embedding.default": lambda words, text: aten.embedding(words.sin(), text),
    "index.Tensor": lambda x, numbers, more_numbers: aten.index(x.sin(), [numbers, more_numbers]),
    "index.Tensor of axes apart": lambda x, pair_numbers: aten.index(
        x.sin(), [pair_numbers[:, :1], None, pair_numbers // 2]
    ),
    "cat.default": lambda x, y: aten.cat([x.sin(), y], 1),
    "stack.default": lambda x, y: aten.stack([x.sin(), y], 1),
    "scatter_add.default": lambda x, y, index: aten.scatter_add(x.sin(), 1, index, y),
    "scatter.src": lambda x, y, index: aten.scatter(x.sin(), 1, index.sort(1).indices, y),
    "scatter.value": lambda x, index: aten.scatter(x.sin(), 1, index, 0.5),
    "scatter_reduce.two": lambda x, y, index: aten.scatter_reduce.two(x.sin(), 1, index, y, "sum"),
    "index_add.default": lambda x, numbers, rows: aten.index_add(x.sin(), 0, numbers, rows),
    "index_copy.default": lambda x, rows: aten.index_copy(rows.sin(), 0, torch.arange(40) + 9, x),
    "index_fill.int_Scalar": lambda x, numbers: aten.index_fill(x.sin(), 0, numbers, 0.5),
    "index_fill.int_Tensor": lambda x, numbers: aten.index_fill(x.sin(), 0, numbers, torch.tensor(0.5)),
    "index_reduce.default": lambda x, numbers, rows: aten.index_reduce(x.sin(), 0, numbers, rows, "mean"),
    "slice_scatter.default": lambda x, rows: aten.slice_scatter(rows.sin(), x, 0, 7, 47),
    "searchsorted.Tensor": lambda x, y: aten.searchsorted(x.sort(2).values, y),
    "bucketize.Tensor": lambda x, row: aten.bucketize(x.sin(), row.sort().values),
    "take.default": lambda words, index: aten.take(words.sin(), index * 200),
    "view_as_real.default": lambda x, y: aten.view_as_real(aten.complex(x, y).sin()),
    "view_as_complex.default": lambda x: aten.view_as_complex(x.sin().reshape(40, 48, 18, 2)).abs(),
    "an item": lambda x: aten.max(x.sin(), 1)[0],
}
