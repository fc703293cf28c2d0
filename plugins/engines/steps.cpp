// Steps of SGD of dense networks, many clients side by side: `local._descended` without Python between two operations.
//
// The same operations of ATen follow each other, on tensors of the same layouts. So the bits are those of the Python
// code (tested).

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/add.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <optional>
#include <vector>

namespace {

using at::Tensor;
using std::vector;

// What one layer reads and writes in every step.
struct Layer {
  Tensor bias, weight, transposed;  // [M, 1, n_out], [M, n_out, n_in], [M, n_in, n_out]
  Tensor in, out;                   // [M, B, n_in], [M, B, n_out]
  Tensor grad, grad_transposed;     // of `out`: [M, B, n_out], [M, n_out, B]
  Tensor of_weight, of_bias;

  void take(const Tensor& weight_, const Tensor& bias_) {
    weight = weight_;
    transposed = weight.transpose(1, 2);
    bias = bias_.unsqueeze(1);
  }
};

// M clients, S steps, B samples, C classes.
//
// params, grads, out: weight [M, n_out, n_in] and bias [M, n_out] of each layer. A ReLU follows each but the last one.
// `grads` is scratch memory, and `out` gets the trained parameters. x [n, n_in]; index, y, fraction [S, M, B]; live
// [S, M]. `fraction` is the weight of each sample's log p in the loss. `live` says whether a client has such a step.
// Returns the losses of the samples, [S, M, B].
Tensor steps(at::TensorList params, const Tensor& x, const Tensor& index, const Tensor& y, const Tensor& fraction,
             const std::optional<Tensor>& live, double rate, at::TensorList grads, at::TensorList out) {
  c10::InferenceMode no_gradients;
  const int64_t S = index.size(0), M = index.size(1), B = index.size(2), C = params.back().size(1);
  const auto options = params[0].options();
  Tensor rows = at::empty({M * B, x.size(1)}, options), losses = at::empty({S, M, B}, options);
  Tensor by_class = at::empty({C, M * B}, options), log_p = at::empty_like(by_class), of_p = at::empty_like(by_class);
  vector<Layer> layers(params.size() / 2);
  Tensor h = rows.view({M, B, -1});
  for (size_t l = 0; l < layers.size(); ++l) {
    Layer& layer = layers[l];
    layer.in = h;
    layer.take(params[2 * l], params[2 * l + 1]);
    layer.of_weight = grads[2 * l];
    layer.of_bias = grads[2 * l + 1];
    h = layer.out = at::empty({M, B, layer.weight.size(1)}, options);
    layer.grad = l + 1 < layers.size() ? at::empty_like(h) : of_p.t().view({M, B, C});
    layer.grad_transposed = layer.grad.transpose(1, 2);
  }
  // Through three axes, as in `plugins.core.data.log_softmax`.
  Tensor class_first = by_class.view({C, 1, M * B}), logits = h.view({1, M * B, C}).permute({2, 0, 1});
  const vector<Tensor> chosen = index.reshape({S, M * B}).unbind();
  const vector<Tensor> labels = y.reshape({S, 1, M * B}).unbind();
  const vector<Tensor> fractions = fraction.reshape({S, 1, M * B}).unbind();
  vector<Tensor> now = params.vec(), of_samples = losses.view({S, 1, M * B}).unbind();
  for (int64_t s = 0; s < S; ++s) {
    at::index_select_out(rows, x, 0, chosen[s]);
    for (Layer& layer : layers) {
      at::baddbmm_out(layer.out, layer.bias, layer.in, layer.transposed);
      if (&layer != &layers.back()) at::relu_(layer.out);
    }
    class_first.copy_(logits);
    at::_log_softmax_out(log_p, by_class, 0, false);
    at::gather_out(of_samples[s], log_p, 0, labels[s]);
    by_class.zero_().scatter_(0, labels[s], fractions[s]);
    at::_log_softmax_backward_data_out(of_p, by_class, log_p, 0, log_p.scalar_type());
    for (size_t l = layers.size(); l-- > 0;) {
      Layer& layer = layers[l];
      if (l > 0) at::bmm_out(layers[l - 1].grad, layer.grad, layer.weight);
      at::bmm_out(layer.of_weight, layer.grad_transposed, layer.in);
      at::sum_out(layer.of_bias, layer.grad, 1);
      if (l > 0) at::threshold_backward_out(layers[l - 1].grad, layers[l - 1].grad, layer.in, 0);
    }
    if (s > 0 && !live) {
      at::_foreach_add_(out, grads, -rate);
      continue;
    }
    for (size_t p = 0; p < now.size(); ++p) {
      Tensor left = out[p];
      if (live) {
        vector<int64_t> shape(left.dim(), 1);
        shape[0] = M;
        at::where_out(left, (*live)[s].view(shape), at::add(now[p], grads[p], -rate), now[p]);
      } else {
        at::add_out(left, now[p], grads[p], -rate);
      }
    }
    now = out.vec();
    for (size_t l = 0; l < layers.size(); ++l) layers[l].take(now[2 * l], now[2 * l + 1]);
  }
  return losses.neg_();
}

TORCH_LIBRARY(fedml_noniid, library) {
  library.def(
      "steps(Tensor[] params, Tensor x, Tensor index, Tensor y, Tensor fraction, Tensor? live, float rate, "
      "Tensor(a!)[] grads, Tensor(b!)[] out) -> Tensor",
      &steps);
}

}  // namespace
