#include "bindings/c/handles.h"
#include "bindings/c/status.h"

using sluice::ErrorCode;
using sluice::fail;
using sluice::Json;
using namespace sluice::c;  // NOLINT: what follows is of this room

Json sluice::c::settings_of(const sluice_setting* settings, std::size_t count, const char* what) {
  if (count > optim::setting_table().size())
    fail(ErrorCode::kInvalidArgument, "'{}' has {} entries, and there are {} settings in all", what, count,
         optim::setting_table().size());
  Json all = Json::object();
  for (std::size_t i = 0; i < count; ++i) {
    const sluice_setting& given = (&required(settings, what))[i];
    const std::string name = &required(given.name, "sluice_setting.name");
    if (all.contains(name))
      fail(ErrorCode::kInvalidArgument, "{} is given twice in '{}'; give it once", name, what);
    if (given.text != nullptr && given.number != 0)
      fail(ErrorCode::kInvalidArgument, "{} is given as '{}' and as {}; give one of them", name, given.text,
           given.number);
    all[name] = given.text != nullptr ? Json(given.text) : Json(given.number);
  }
  return all;
}

sluice_status sluice_optimizer_settings(char** json) {
  return guarded([&] { required(json, "json") = new_text(sluice::optim::setting_table_json().dump(2)); });
}

sluice_status sluice_optimizer_check(const char* optimizer, const sluice_setting* settings,
                                     size_t setting_count) {
  return guarded([&] {
    sluice::optim::make_optimizer(
        {&required(optimizer, "optimizer"), settings_of(settings, setting_count, "settings"), {}});
  });
}
