// Operators of the emulated GPUs: the kernels of the CPU, on the same memory.
//
// Every operator of ATen that has a CUDA kernel gets this one instead: it looks at its tensors as tensors of the CPU,
// calls the CPU's kernel, and brings what is new into memory of the device. Operators that only look at memory in
// another way, or allocate it, keep torch's own. An operator waits for the stream that it would have been launched on;
// so operators are never late, and copies may be.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

namespace at::cuda {
void *getCurrentCUDABlasHandle(bool setup); // of ATen/cuda/CUDAContextLight.h, which wants cuSPARSE's headers
}

namespace {

using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet ABOVE = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks |
                                  c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});

/// The names of operators that take tensors of the CPU beside those of a device.
bool takes_both(const std::string &name) {
    static const std::set<std::string> names{"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                             "aten::index_put", "aten::_unsafe_index"};
    return names.count(name) > 0;
}

/// The names of operators that torch has cuBLAS compute: from the first on, a thread has a workspace on its stream.
bool multiplies(const std::string &name) {
    static const std::set<std::string> names{"aten::mm",      "aten::addmm",    "aten::addmm_", "aten::bmm",
                                             "aten::baddbmm", "aten::baddbmm_", "aten::addmv",  "aten::addmv_",
                                             "aten::dot",     "aten::vdot",     "aten::_addmm_activation"};
    return names.count(name) > 0;
}

using Maybe = c10::optional<at::Tensor>;

/// A generator of the CPU that goes on where a device's is, which then has gone on, too.
at::Generator drawing(c10::optional<at::Generator> given, c10::Device device) {
    at::Generator of = given && given->defined() ? *given : at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(of.mutex());
    uint64_t mixed = of.current_seed() * 0x9E3779B97F4A7C15ull + of.get_offset();
    of.set_offset(of.get_offset() + 4);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    return at::make_generator<at::CPUGeneratorImpl>(mixed ^ (mixed >> 31));
}

/// One call: its tensors on a device, and how the CPU looks at them.
struct Call {
    std::string name;
    c10::optional<c10::Device> device;
    std::unordered_map<c10::StorageImpl *, c10::Storage> storages;
    std::vector<std::pair<at::Tensor, at::Tensor>> seen;

    void on(c10::Device one) {
        TORCH_CHECK(!device || *device == one, name, ": expected all tensors to be on the same device, but found ",
                    *device, " and ", one);
        device = one;
    }

    at::Tensor view(const at::Tensor &there, bool written = false) {
        if (!there.defined() || !there.is_cuda()) {
            TORCH_CHECK(!there.defined() || there.dim() == 0 || takes_both(name) || there.is_meta(), name,
                        ": a tensor of the CPU among those of a device");
            return there;
        }
        on(there.device());
        for (auto &[known, here] : seen)
            if (known.is_same(there)) return here;
        TORCH_CHECK(there.layout() == at::kStrided, name, ": only strided tensors are emulated");
        at::Tensor here;
        if (written && there.numel() == 0) { // the operator gives it its size
            here = at::empty({0}, there.options().device(at::kCPU)).resize_(there.sizes());
        } else {
            auto *storage = there.storage().unsafeGetStorageImpl();
            auto found = storages.find(storage);
            if (found == storages.end()) {
                c10::DataPtr pointer(const_cast<void *>(there.storage().data()), c10::Device(c10::kCPU));
                found = storages
                            .emplace(storage, c10::Storage(c10::Storage::use_byte_size_t(), storage->nbytes(),
                                                           std::move(pointer), nullptr, false))
                            .first;
            }
            here = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                            c10::DispatchKeySet(c10::DispatchKey::CPU), there.dtype());
            here.unsafeGetTensorImpl()->set_sizes_and_strides(there.sizes(), there.strides(), there.storage_offset());
            if (there.numel()) {
                int64_t last = there.storage_offset();
                for (int64_t n = 0; n < there.dim(); n++) last += (there.size(n) - 1) * there.stride(n);
                TORCH_CHECK(static_cast<size_t>((last + 1) * there.element_size()) <= storage->nbytes(), name,
                            ": an illegal memory access: a tensor of sizes ", there.sizes(), " over ",
                            storage->nbytes(), " bytes");
            }
            if (there.is_conj()) here._set_conj(true);
            if (there.is_neg()) here._set_neg(true);
        }
        seen.emplace_back(there, here);
        return here;
    }

    /// What the CPU has made, on the device.
    at::Tensor result(const at::Tensor &here) {
        if (!here.defined()) return here;
        for (auto &[there, known] : seen)
            if (known.is_same(here)) return there;
        for (auto &[there, known] : seen)
            if (here.storage().unsafeGetStorageImpl() == known.storage().unsafeGetStorageImpl()) {
                auto again = at::detail::make_tensor<c10::TensorImpl>(
                    c10::Storage(there.storage()), there.key_set() & c10::DispatchKeySet(c10::DispatchKey::CUDA),
                    here.dtype());
                again.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
                return again;
            }
        auto dense = here.is_non_overlapping_and_dense() ? here : here.contiguous();
        auto made = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(*device));
        if (dense.numel()) std::memcpy(made.data_ptr(), dense.data_ptr(), dense.nbytes());
        return made;
    }

    /// Tensors that got their size from the operator.
    void resized() {
        for (auto &[there, here] : seen) {
            if (there.sizes() == here.sizes() && there.strides() == here.strides()) continue;
            there.resize_(here.sizes());
            if (there.strides() != here.strides())
                there.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(),
                                                                   there.storage_offset());
            if (here.numel() && here.const_data_ptr() != there.const_data_ptr())
                std::memcpy(there.data_ptr(), here.const_data_ptr(), here.nbytes());
        }
    }

    void wait() {
        c10::cuda::CUDAGuard guard(*device); // whose null stream it may be
        auto stream = c10::cuda::getCurrentCUDAStream(device->index());
        C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
    }
};

IValue looked_at(Call &call, const IValue &value, bool written) {
    if (value.isTensor()) return call.view(value.toTensor(), written);
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector()) list.push_back(call.view(tensor, written));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<c10::optional<at::Tensor>> list;
        for (const Maybe &tensor : value.toOptionalTensorVector())
            list.push_back(tensor && tensor->defined() ? c10::optional<at::Tensor>(call.view(*tensor)) : tensor);
        return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
        auto device = value.toDevice();
        call.on(device.has_index() ? device : c10::Device(c10::kCUDA, c10::cuda::current_device()));
        return c10::Device(c10::kCPU);
    }
    return value;
}

void on_cpu(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    const auto &schema = op.schema();
    const auto &arguments = schema.arguments();
    const size_t begin = stack->size() - arguments.size();
    static const auto GENERATOR = c10::OptionalType::create(c10::GeneratorType::get());
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{schema.name()};
    for (size_t n = 0; n < arguments.size(); n++) {
        auto *alias = arguments[n].alias_info();
        (*stack)[begin + n] = looked_at(call, (*stack)[begin + n], alias && alias->isWrite());
    }
    if (!call.device) call.on(c10::Device(c10::kCUDA, c10::cuda::current_device()));
    c10::cuda::CUDAGuard guard(*call.device);
    for (size_t n = 0; n < arguments.size(); n++)
        if (*arguments[n].type() == *GENERATOR) {
            auto &value = (*stack)[begin + n];
            value = drawing(value.isNone() ? c10::nullopt : c10::optional<at::Generator>(value.toGenerator()),
                            *call.device);
        }
    if (multiplies(call.name)) at::cuda::getCurrentCUDABlasHandle(true);
    call.wait();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    call.resized();
    for (size_t n = stack->size() - schema.returns().size(); n < stack->size(); n++) {
        auto &value = (*stack)[n];
        if (value.isTensor()) {
            value = call.result(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &tensor : value.toTensorVector()) list.push_back(call.result(tensor));
            value = list;
        }
    }
}

// ---- operators whose CUDA kernels the CPU has not, or that mean something else there

/// Copies between memories are torch's own; those that change strides or dtypes on a device would be kernels.
at::Tensor &copied(at::Tensor &self, const at::Tensor &source, bool non_blocking) {
    bool kernel = self.is_cuda() && source.is_cuda() && self.numel() > 0 && !self.is_same(source) &&
                  (self.dtype() != source.dtype() || self.sizes() != source.sizes() ||
                   self.is_conj() != source.is_conj() || self.is_neg() != source.is_neg() ||
                   !((self.is_contiguous() && source.is_contiguous()) ||
                     (self.strides() == source.strides() && self.is_non_overlapping_and_dense())));
    if (!kernel) return at::native::copy_(self, source, non_blocking);
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call to{"aten::copy_"}, from{"aten::copy_"};
    auto target = to.view(self), origin = from.view(source);
    c10::cuda::CUDAGuard guard(source.device());
    to.wait(), from.wait();
    at::native::copy_(target, origin, false);
    return self;
}

std::tuple<at::Tensor, at::Tensor> dropped(const at::Tensor &input, double p, c10::optional<bool> train) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::native_dropout"};
    auto here = call.view(input);
    call.wait();
    auto mask = at::empty(here.sizes(), here.options().dtype(at::kBool));
    if (!train.value_or(true)) { return {call.result(here.clone()), call.result(mask.fill_(true))}; }
    mask.bernoulli_(1 - p, drawing(c10::nullopt, *call.device));
    return {call.result(here * mask * (p < 1 ? 1 / (1 - p) : 0.0)), call.result(mask)};
}

/// Attention as the fused kernels compute it: probabilities are made anew in the backward, from their sums' logarithms.
struct Attention {
    at::Tensor query, key, value, bias, dropped; // float32; `dropped` has what probabilities are multiplied by
    double scale;
    int64_t groups; // heads of the query for one of the key

    Attention(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const at::Tensor &b, bool causal,
              c10::optional<double> given, double p, int64_t seed)
        : scale(given.value_or(1 / std::sqrt(double(q.size(-1))))), groups(q.size(1) / k.size(1)) {
        query = q.to(at::kFloat), key = many(k.to(at::kFloat)), value = many(v.to(at::kFloat));
        auto sizes = {q.size(0), q.size(1), q.size(2), k.size(2)};
        bias = b.defined() ? b.to(at::kFloat) : at::zeros({}, query.options());
        if (causal)
            bias = bias.expand(sizes).masked_fill(at::ones({q.size(2), k.size(2)}, at::kBool).tril().logical_not(),
                                                  -INFINITY);
        dropped = at::ones({}, query.options());
        if (p > 0)
            dropped =
                at::empty(sizes, query.options()).bernoulli_(1 - p, at::make_generator<at::CPUGeneratorImpl>(seed)) /
                (1 - p);
    }
    at::Tensor many(const at::Tensor &one) const { return groups > 1 ? one.repeat_interleave(groups, 1) : one; }
    at::Tensor few(const at::Tensor &one) const {
        return groups > 1 ? one.unflatten(1, {one.size(1) / groups, groups}).sum(2) : one;
    }
    at::Tensor scores() const { return at::matmul(query, key.transpose(-2, -1)) * scale + bias; }
    at::Tensor probabilities(const at::Tensor &logsumexp) const {
        return (scores() - logsumexp.unsqueeze(-1)).exp().nan_to_num(0.0);
    }
    std::tuple<at::Tensor, at::Tensor> forward() const {
        auto logsumexp = scores().logsumexp(-1);
        return {at::matmul(probabilities(logsumexp) * dropped, value), logsumexp};
    }
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor &gradient,
                                                                        const at::Tensor &logsumexp) const {
        auto p = probabilities(logsumexp), g = gradient.to(at::kFloat);
        auto of_p = at::matmul(g, value.transpose(-2, -1)) * dropped;
        auto of_s = p * (of_p - (of_p * p).sum(-1, true));
        return {at::matmul(of_s, key) * scale, few(at::matmul(of_s.transpose(-2, -1), query) * scale),
                few(at::matmul((p * dropped).transpose(-2, -1), g)), of_s};
    }
};

int64_t seed_of_dropout(double p, c10::Device device) {
    return p > 0 ? int64_t(drawing(c10::nullopt, device).current_seed() >> 1) : 0;
}
at::Tensor heads_last(const at::Tensor &one, c10::ScalarType dtype) {
    return one.to(dtype).transpose(1, 2).contiguous().transpose(1, 2);
}

/// In the layout of another tensor of its shape, as flash's results are in those of its arguments.
at::Tensor like(const at::Tensor &one, const at::Tensor &other) { return at::empty_like(other).copy_(one); }

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(const at::Tensor &q, const at::Tensor &k,
                                                                     const at::Tensor &v, const Maybe &bias,
                                                                     bool with_logsumexp, double p, bool causal,
                                                                     c10::optional<double> scale) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::_scaled_dot_product_efficient_attention"};
    auto x = call.view(q), y = call.view(k), z = call.view(v),
         b = bias && bias->defined() ? call.view(*bias) : at::Tensor();
    call.wait();
    auto seed = seed_of_dropout(p, *call.device);
    auto [out, logsumexp] = Attention(x, y, z, b, causal, scale, p, seed).forward();
    auto rows = with_logsumexp ? (q.size(2) + 31) / 32 * 32 : 0;
    logsumexp = with_logsumexp ? at::constant_pad_nd(logsumexp, {0, rows - q.size(2)}, INFINITY)
                               : logsumexp.narrow(2, 0, 0).clone();
    return {call.result(heads_last(out, q.scalar_type())), call.result(logsumexp), at::scalar_tensor(seed, at::kLong),
            at::scalar_tensor(0, at::kLong)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>
efficient_backward(const at::Tensor &gradient, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                   const at::Tensor &bias, const at::Tensor &, const at::Tensor &logsumexp, const at::Tensor &seed,
                   const at::Tensor &, double p, std::array<bool, 4> wanted, bool causal, c10::optional<double> scale) {
    if (!gradient.defined()) return {};
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::_scaled_dot_product_efficient_attention_backward"};
    auto x = call.view(q), y = call.view(k), z = call.view(v), b = bias.defined() ? call.view(bias) : at::Tensor();
    auto g = call.view(gradient), l = call.view(logsumexp);
    call.wait();
    auto [a, c, d, e] =
        Attention(x, y, z, b, causal, scale, p, seed.item<int64_t>()).backward(g, l.narrow(2, 0, q.size(2)));
    auto type = q.scalar_type();
    return {call.result(heads_last(a, type)), call.result(heads_last(c, type)), call.result(heads_last(d, type)),
            wanted[3] && bias.defined() ? call.result(at::sum_to(e, b.sizes()).to(type)) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
flash(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, double p, bool causal, bool,
      c10::optional<double> scale) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::_scaled_dot_product_flash_attention"};
    auto x = call.view(q), y = call.view(k), z = call.view(v);
    call.wait();
    auto seed = seed_of_dropout(p, *call.device);
    auto [out, logsumexp] = Attention(x, y, z, {}, causal, scale, p, seed).forward();
    return {call.result(like(out, x)),
            call.result(logsumexp),
            at::Tensor(),
            at::Tensor(),
            q.size(2),
            k.size(2),
            call.result(at::full({2}, seed, at::kLong).view(at::kUInt64)),
            call.result(at::empty({}, at::kUInt64)),
            call.result(at::empty({0}, x.options()))};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor>
flash_backward(const at::Tensor &gradient, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
               const at::Tensor &, const at::Tensor &logsumexp, const at::Tensor &, const at::Tensor &, c10::SymInt,
               c10::SymInt, double p, bool causal, const at::Tensor &state, const at::Tensor &,
               c10::optional<double> scale) {
    if (!gradient.defined()) return {};
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::_scaled_dot_product_flash_attention_backward"};
    auto x = call.view(q), y = call.view(k), z = call.view(v), g = call.view(gradient), l = call.view(logsumexp);
    call.wait();
    auto seed = static_cast<const int64_t *>(call.view(state).const_data_ptr())[0];
    auto [a, c, d, e] = Attention(x, y, z, {}, causal, scale, p, seed).backward(g, l);
    return {call.result(like(a, x)), call.result(like(c, y)), call.result(like(d, z))};
}

/// Normalisations of halves: a GPU computes in float32, and keeps its statistics so.
at::Tensor wide(const at::Tensor &one) {
    return one.defined() && (one.scalar_type() == at::kHalf || one.scalar_type() == at::kBFloat16) ? one.to(at::kFloat)
                                                                                                   : one;
}
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
Three layer_norm(const at::Tensor &input, c10::SymIntArrayRef shape, const Maybe &weight, const Maybe &bias,
                 double epsilon) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::native_layer_norm"};
    auto x = call.view(input), w = wide(call.view(weight.value_or(at::Tensor()))),
         b = wide(call.view(bias.value_or(at::Tensor())));
    call.wait();
    auto [out, mean, inverse] = at::native_layer_norm_symint(wide(x), shape, w, b, epsilon);
    return {call.result(out.to(x.scalar_type())), call.result(mean), call.result(inverse)};
}
Three layer_norm_backward(const at::Tensor &gradient, const at::Tensor &input, c10::SymIntArrayRef shape,
                          const at::Tensor &mean, const at::Tensor &inverse, const Maybe &weight, const Maybe &bias,
                          std::array<bool, 3> wanted) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::native_layer_norm_backward"};
    auto g = call.view(gradient), x = call.view(input), m = call.view(mean), i = call.view(inverse);
    auto w = call.view(weight.value_or(at::Tensor())), b = call.view(bias.value_or(at::Tensor()));
    call.wait();
    auto [of_x, of_w, of_b] =
        at::native_layer_norm_backward_symint(wide(g), wide(x), shape, m, i, wide(w), wide(b), wanted);
    auto like = [&](const at::Tensor &made, const at::Tensor &one) {
        return made.defined() ? call.result(one.defined() ? made.to(one.scalar_type()) : made) : made;
    };
    return {like(of_x, x), like(of_w, w), like(of_b, w)};
}

Three batch_norm(const at::Tensor &input, const Maybe &weight, const Maybe &bias, const Maybe &mean,
                 const Maybe &variance, bool training, double momentum, double epsilon) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::native_batch_norm"};
    auto x = call.view(input), w = wide(call.view(weight.value_or(at::Tensor()))),
         b = wide(call.view(bias.value_or(at::Tensor())));
    auto m = call.view(mean.value_or(at::Tensor())), v = call.view(variance.value_or(at::Tensor()));
    call.wait();
    auto known_mean = wide(m), known_variance = wide(v);
    auto [out, saved, inverse] =
        at::native_batch_norm(wide(x), w, b, known_mean, known_variance, training, momentum, epsilon);
    if (m.defined() && !known_mean.is_same(m)) m.copy_(known_mean), v.copy_(known_variance);
    return {call.result(out.to(x.scalar_type())), call.result(saved), call.result(inverse)};
}
Three batch_norm_backward(const at::Tensor &gradient, const at::Tensor &input, const Maybe &weight, const Maybe &mean,
                          const Maybe &variance, const Maybe &saved, const Maybe &inverse, bool training,
                          double epsilon, std::array<bool, 3> wanted) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::native_batch_norm_backward"};
    auto of = [&](const Maybe &one) { return wide(call.view(one.value_or(at::Tensor()))); };
    auto x = call.view(input), w = call.view(weight.value_or(at::Tensor()));
    auto g = of(gradient), m = of(mean), v = of(variance), s = of(saved), i = of(inverse);
    call.wait();
    auto [a, b, c] = at::native_batch_norm_backward(g, wide(x), wide(w), m, v, s, i, training, epsilon, wanted);
    auto type = w.defined() ? w.scalar_type() : at::kFloat;
    return {a.defined() ? call.result(a.to(x.scalar_type())) : a, b.defined() ? call.result(b.to(type)) : b,
            c.defined() ? call.result(c.to(type)) : c};
}

/// cuDNN's, which also keeps a reserve: nothing here.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>
cudnn_batch_norm(const at::Tensor &input, const at::Tensor &weight, const Maybe &bias, const Maybe &mean,
                 const Maybe &variance, bool training, double momentum, double epsilon) {
    auto reserve = at::empty({0}, input.options().dtype(at::kByte));
    return std::tuple_cat(batch_norm(input, weight, bias, mean, variance, training, momentum, epsilon),
                          std::make_tuple(reserve));
}
Three cudnn_batch_norm_backward(const at::Tensor &input, const at::Tensor &gradient, const at::Tensor &weight,
                                const Maybe &mean, const Maybe &variance, const Maybe &saved, const Maybe &inverse,
                                double epsilon, const at::Tensor &) {
    return batch_norm_backward(gradient, input, weight, mean, variance, saved, inverse, true, epsilon,
                               {true, true, true});
}

/// Softmax of halves into floats, which is one kernel on a GPU.
template <auto kernel> at::Tensor widened(const at::Tensor &input, int64_t dim, bool half_to_float) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::_softmax"};
    auto here = call.view(input);
    call.wait();
    return call.result(kernel(half_to_float ? here.to(at::kFloat) : here, dim, false));
}
template <auto kernel>
at::Tensor narrowed(const at::Tensor &gradient, const at::Tensor &output, int64_t dim, c10::ScalarType dtype) {
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Call call{"aten::_softmax_backward_data"};
    auto here = call.view(gradient), out = call.view(output);
    call.wait();
    return call.result(kernel(here, out, dim, here.scalar_type()).to(dtype));
}

/// Whether an operator keeps torch's own kernel: it allocates, reads one number, chooses, or looks at memory in another
/// way.
bool kept(const c10::FunctionSchema &schema) {
    static const std::set<std::string> own{"aten::empty",
                                           "aten::empty_strided",
                                           "aten::resize_",
                                           "aten::set_",
                                           "aten::_local_scalar_dense",
                                           "aten::record_stream",
                                           "aten::_fused_sdp_choice",
                                           "aten::is_pinned",
                                           "aten::_pin_memory",
                                           "aten::_efficientzerotensor",
                                           "aten::is_set_to",
                                           "aten::_has_same_storage_numel"};
    const auto &returns = schema.returns();
    return own.count(schema.name()) || std::any_of(returns.begin(), returns.end(), [](const c10::Argument &one) {
               return one.alias_info() && !one.alias_info()->isWrite();
           });
}

} // namespace

/// Gives torch these operators, over its own.
extern "C" void emulate() {
    struct Silent : c10::WarningHandler {
        void process(const c10::Warning &) override {}
    } silent;
    c10::WarningUtils::WarningHandlerGuard quiet(&silent);
    static torch::Library lib(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    auto &dispatcher = c10::Dispatcher::singleton();
    for (const auto &name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
        auto op = dispatcher.findSchema(name);
        if (name.getNamespace() != "aten" || !op || kept(op->schema())) continue;
        lib.impl(toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
    lib.impl("native_batch_norm", TORCH_FN(batch_norm));
    lib.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward));
    lib.impl("native_layer_norm", TORCH_FN(layer_norm));
    lib.impl("native_layer_norm_backward", TORCH_FN(layer_norm_backward));
    lib.impl("_softmax", TORCH_FN((widened<&at::_softmax>)));
    lib.impl("_log_softmax", TORCH_FN((widened<&at::_log_softmax>)));
    lib.impl("_softmax_backward_data", TORCH_FN((narrowed<&at::_softmax_backward_data>)));
    lib.impl("_log_softmax_backward_data", TORCH_FN((narrowed<&at::_log_softmax_backward_data>)));
    lib.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    lib.impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
    lib.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
    lib.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
    lib.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
    lib.impl("copy_", TORCH_FN(copied));
    lib.impl("native_dropout", TORCH_FN(dropped));
    lib.impl("cudnn_batch_norm", TORCH_FN(cudnn_batch_norm));
    lib.impl("cudnn_batch_norm_backward", TORCH_FN(cudnn_batch_norm_backward));
}
