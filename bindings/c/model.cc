#include <string>

#include "bindings/c/handles.h"
#include "bindings/c/status.h"

using sluice::ErrorCode;
using sluice::fail;
using namespace sluice::c;  // NOLINT: the whole file is of this room

sluice_status sluice_model_create(sluice_model** model) {
  return guarded([&] { required(model, "model") = new sluice_model; });
}

void sluice_model_destroy(sluice_model* model) { delete model; }

sluice_status sluice_model_add_unit(sluice_model* model, const char* name, uint32_t* unit) {
  return guarded([&] {
    auto& units = required(model, "model").units;
    units.push_back({&required(name, "name"), {}});
    if (unit != nullptr) *unit = static_cast<uint32_t>(units.size() - 1);
  });
}

sluice_status sluice_model_add_parameter(sluice_model* model, const sluice_parameter* parameter,
                                         uint32_t* id) {
  return guarded([&] {
    const sluice_parameter given = known_part(parameter, "parameter");
    if (required(model, "model").units.empty())
      fail(ErrorCode::kInvalidArgument, "a parameter is added before the first unit; add a unit");
    sluice::engine::ParameterSpec spec;
    spec.name = &required(given.name, "parameter.name");
    sluice::engine::UnitSpec& unit = model->units.back();
    const sluice::Dtype dtype = dtype_of(given.dtype);
    if (!unit.parameters.empty() && dtype != unit.dtype)
      fail(ErrorCode::kInvalidArgument,
           "'{}' is {}, and unit '{}', to which it is added, has {}; give each type a unit of its own",
           spec.name, name_of(dtype), unit.name, name_of(unit.dtype));
    spec.group = given.group;
    spec.span_first = given.span_first;
    spec.span_elements = given.span_elements;
    spec.by_elements = given.by_elements != 0;
    for (std::size_t i = 0; i < given.dimensions; ++i)
      spec.shape.push_back((&required(given.shape, "parameter.shape"))[i]);
    if (spec.shape.empty()) spec.shape.push_back(1);
    unit.dtype = dtype;
    unit.parameters.push_back(std::move(spec));
    if (id != nullptr) *id = static_cast<uint32_t>(model->frozen.size());
    model->frozen.push_back(given.frozen != 0);
  });
}
