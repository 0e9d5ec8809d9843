#include "bindings/cli/profile_page.h"

#include <string_view>

#include "core/error.h"
#include "core/text_file.h"
#include "profile_page_data.h"

namespace sluice::cli {
namespace {

void put(std::string& page, std::string_view mark, std::string_view text) {
  const std::size_t at = page.find(mark);
  ensure(at != std::string::npos, "the report's page has no mark {}", mark);
  page.replace(at, mark.size(), text);
}

// Escapes the data, so that nothing in it ends the HTML element that contains it.
std::string for_script(std::string_view json) {
  std::string text;
  text.reserve(json.size());
  for (const char c : json)
    if (c == '<')
      text += "\\u003c";
    else
      text += c;
  return text;
}

}  // namespace

void write_profile(const std::string& path, const std::string& json) {
  std::string page(kProfilePage);
  put(page, "@LIBRARY@", kChartLibrary);
  put(page, "@LICENCE@", kChartLicence);
  put(page, "@DATA@", for_script(json));
  write_text_file(path, page);
}

}  // namespace sluice::cli
