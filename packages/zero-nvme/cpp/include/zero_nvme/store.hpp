// Stripes one range of bytes over several paths. Owns the I/O threads, but not the file descriptors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero_nvme/path_queue.hpp"

namespace zero_nvme {

// Which path holds which bytes. `pattern` lists the paths of one period of units: {0, 1, 0} gives path 0 two thirds.
class StripeMap {
 public:
  StripeMap(std::vector<std::uint32_t> pattern, std::uint64_t unit_bytes);

  struct Place {
    std::uint32_t path;
    std::uint64_t offset;  // in that path's file
    std::uint64_t room;    // bytes from there to the end of the unit
  };
  Place place(std::uint64_t offset) const;

 private:
  const std::vector<std::uint32_t> pattern_;
  const std::uint64_t unit_bytes_;
  std::vector<std::uint64_t> rank_;   // of each unit of the period: how many of its path come before it
  std::vector<std::uint64_t> count_;  // of each path: its units in a period
};

struct Options {
  std::string backend;  // the name of a RegisteredBackend
  Limits limits;
  unsigned threads;
  std::size_t max_requests;
};

class Store {
 public:
  // Throws std::system_error, or std::invalid_argument for options that are invalid on every kernel.
  Store(const std::vector<PathFile>& files, StripeMap stripes, const Options& options);

  // nullptr: max_requests are not complete yet; wait on gate() and try again.
  std::shared_ptr<Request> try_submit(Op op, std::uint64_t offset, char* memory, std::size_t nbytes);
  Gate& gate() noexcept { return *gate_; }
  const std::vector<std::unique_ptr<PathQueue>>& paths() const noexcept { return paths_; }
  void close_in_child() noexcept;

 private:
  const StripeMap stripes_;
  const std::shared_ptr<Gate> gate_;
  std::vector<std::unique_ptr<PathQueue>> paths_;
};

}  // namespace zero_nvme
