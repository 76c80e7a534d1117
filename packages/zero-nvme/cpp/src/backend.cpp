#include "zero_nvme/backend.hpp"

#include <algorithm>
#include <stdexcept>

namespace zero_nvme {
namespace {

// Made by the first entry, since files initialise their variables in no order that can be relied on.
std::vector<RegisteredBackend>& table() {
  static std::vector<RegisteredBackend> entries;
  return entries;
}

}  // namespace

RegisteredBackend::RegisteredBackend(const char* name, int place, Make make) : name(name), place(place), make(make) {
  auto& entries = table();
  const auto later = [](const RegisteredBackend& a, const RegisteredBackend& b) { return a.place < b.place; };
  entries.insert(std::upper_bound(entries.begin(), entries.end(), *this, later), *this);
}

const std::vector<RegisteredBackend>& backends() { return table(); }

std::unique_ptr<Backend> make_backend(const std::string& name, const BackendArguments& arguments) {
  for (const RegisteredBackend& entry : table()) {
    if (name == entry.name) return entry.make(arguments);
  }
  throw std::invalid_argument("no native backend is called " + name);
}

}  // namespace zero_nvme
