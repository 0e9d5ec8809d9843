#include "models/ops/activation.h"

#include "kernels/elementwise.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

OpSpec activation_spec(std::string name, ValueId x, ValueId y, double forward_bytes, double backward_bytes) {
  return {.name = std::move(name),
          .inputs = {x},
          .outputs = {y},
          .saved = {x},
          .forward_bytes = forward_bytes,
          .backward_bytes = backward_bytes};
}

OpSpec gelu_spec(std::string name, ValueId x, ValueId y, double bytes) {
  OpSpec spec = activation_spec(std::move(name), x, y, 2 * bytes, 3 * bytes);
  spec.forward_in_place = {{0, 0}};
  spec.backward_in_place = {{0, 0}};
  return spec;
}

class Gelu : public Op {
 public:
  Gelu(std::string name, ValueId x, ValueId y, std::size_t elements, Dtype type)
      : Op(gelu_spec(std::move(name), x, y, static_cast<double>(elements * size_of(type)))),
        elements_(elements) {}

  void forward(const OpContext& context) const override {
    kernels::gelu_forward(context.threads(), elements_, context.input(0), context.output(0));
  }
  void backward(const OpContext& context) const override {
    kernels::gelu_backward(context.threads(), elements_, context.input(0), context.output_gradient(0),
                           context.input_gradient(0));
  }

 private:
  std::size_t elements_;
};

class Swiglu : public Op {
 public:
  Swiglu(std::string name, ValueId x, ValueId y, std::size_t elements, Dtype type)
      : Op(activation_spec(std::move(name), x, y, 3.0 * static_cast<double>(elements * size_of(type)),
                           5.0 * static_cast<double>(elements * size_of(type)))),
        elements_(elements) {}

  void forward(const OpContext& context) const override {
    const Array gate = context.input(0);
    kernels::swiglu_forward(context.threads(), elements_, gate, gate.at(elements_), context.output(0));
  }
  void backward(const OpContext& context) const override {
    const Array gate = context.input(0), dgate = context.input_gradient(0);
    kernels::swiglu_backward(context.threads(), elements_, gate, gate.at(elements_),
                             context.output_gradient(0), dgate, dgate.at(elements_));
  }

 private:
  std::size_t elements_;
};

}  // namespace

std::unique_ptr<Op> make_gelu(std::string name, ValueId x, ValueId y, std::size_t elements, Dtype type) {
  return std::make_unique<Gelu>(std::move(name), x, y, elements, type);
}

std::unique_ptr<Op> make_swiglu(std::string name, ValueId gates_and_ups, ValueId y, std::size_t elements,
                                Dtype type) {
  return std::make_unique<Swiglu>(std::move(name), gates_and_ups, y, elements, type);
}

}  // namespace sluice::models
