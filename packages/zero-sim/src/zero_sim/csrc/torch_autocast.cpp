// torch.autocast("sim"): the casts that torch does for CUDA, operator by operator.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "torch_device.hpp"

namespace at::autocast {  // of ATen/autocast_mode.h, which takes ten seconds to compile
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace sim {
namespace {
using c10::IValue;
using torch::jit::Stack;

bool is_cast(const at::Tensor& t) { return on_device(t) && t.is_floating_point() && t.scalar_type() != at::kDouble; }

template <class F>
void change_tensors(c10::ArrayRef<c10::Argument> arguments, Stack* stack, F&& f) {
  for (size_t i = stack->size() - arguments.size(); i < stack->size(); i++) {
    IValue& v = (*stack)[i];
    if (v.isTensor() && v.toTensor().defined()) {
      v = f(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (const at::Tensor& t : v.toTensorVector()) changed.push_back(t.defined() ? f(t) : t);
      v = changed;
    }
  }
}
void cast_all(const c10::OperatorHandle& op, Stack* stack, at::ScalarType type) {
  change_tensors(op.schema().arguments(), stack, [&](const at::Tensor& t) {
    return is_cast(t) ? at::autocast::cached_cast(type, t, kSim) : t;
  });
}
struct Without {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::AutocastPrivateUse1};
};

void lower(const c10::OperatorHandle& op, Stack* stack) {
  Without autocast;
  cast_all(op, stack, at::autocast::get_autocast_dtype(kSim));
  op.callBoxed(stack);
}
void fp32(const c10::OperatorHandle& op, Stack* stack) {
  Without autocast;
  cast_all(op, stack, at::kFloat);
  op.callBoxed(stack);
}
void fp32_result(const c10::OperatorHandle& op, Stack* stack) {  // unless the caller asks for a type
  Without autocast;
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone() && is_cast((*stack)[first].toTensor()))
      (*stack)[first + i] = IValue(at::kFloat);
  op.callBoxed(stack);
}
void widest(const c10::OperatorHandle& op, Stack* stack) {
  Without autocast;
  at::ScalarType type = at::autocast::get_autocast_dtype(kSim);
  change_tensors(op.schema().arguments(), stack, [&](const at::Tensor& t) {
    if (is_cast(t) && t.scalar_type() != type) type = at::kFloat;
    return t;
  });
  cast_all(op, stack, type);
  op.callBoxed(stack);
}
void refused(const c10::OperatorHandle&, Stack*) {
  TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
              "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
        "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
        "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
        "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
        "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower>());
  for (const char* name :
       {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
        "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
        "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
        "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
        "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
        "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
        "logsumexp", "norm.Scalar", "norm.ScalarOpt_dim", "upsample_nearest1d", "_upsample_nearest_exact1d",
        "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
        "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
        "upsample_bicubic2d", "_upsample_bicubic2d_aa"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fp32>());
  for (const char* name : {"prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
                           "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
                           "sum.dim_IntList"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fp32_result>());
  for (const char* name : {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
                           "tensordot", "scatter_add", "cat", "stack"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&widest>());
  m.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&refused>());
}
}  // namespace
}  // namespace sim
