#include "zero_nvme/store.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace zero_nvme {

StripeMap::StripeMap(std::vector<std::uint32_t> pattern, std::uint64_t unit_bytes)
    : pattern_(std::move(pattern)), unit_bytes_(unit_bytes) {
  if (pattern_.empty() || unit_bytes_ == 0) throw std::invalid_argument("an empty stripe pattern");
  count_.resize(*std::max_element(pattern_.begin(), pattern_.end()) + std::size_t{1});
  for (std::uint32_t path : pattern_) rank_.push_back(count_[path]++);
}

StripeMap::Place StripeMap::place(std::uint64_t offset) const {
  if (pattern_.size() == 1) return {pattern_[0], offset, std::numeric_limits<std::uint64_t>::max() - offset};
  const std::uint64_t unit = offset / unit_bytes_;
  const std::uint64_t within = offset % unit_bytes_;
  const std::size_t index = unit % pattern_.size();
  const std::uint32_t path = pattern_[index];
  const std::uint64_t unit_of_path = unit / pattern_.size() * count_[path] + rank_[index];
  return {path, unit_of_path * unit_bytes_ + within, unit_bytes_ - within};
}

Store::Store(const std::vector<PathFile>& files, StripeMap stripes, const Options& options)
    : stripes_(std::move(stripes)), gate_(std::make_shared<Gate>(options.max_requests)) {
  const Limits& limits = options.limits;
  if (limits.block_bytes == 0 || limits.depth == 0 || options.threads == 0 || options.max_requests == 0) {
    throw std::invalid_argument("block_bytes, depth, threads and max_requests must be positive");
  }
  for (const PathFile& file : files) {
    if (limits.block_bytes % file.alignment != 0) throw std::invalid_argument("block_bytes must be a multiple of the alignment");
    paths_.push_back(std::make_unique<PathQueue>(static_cast<std::uint32_t>(paths_.size()), file,
                                                 make_backend(options.backend, {file.fd, limits.depth, options.threads}), limits));
  }
}

std::shared_ptr<Request> Store::try_submit(Op op, std::uint64_t offset, char* memory, std::size_t nbytes) {
  if (!gate_->try_enter()) return nullptr;
  auto request = std::make_shared<Request>(nbytes, gate_);
  if (paths_.size() == 1 && nbytes > 0) {
    paths_[0]->submit(Span{request, op, memory, offset, nbytes});
    return request;
  }
  std::vector<std::vector<Span>> spans(paths_.size());
  while (nbytes > 0) {
    const auto place = stripes_.place(offset);
    const std::size_t take = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, place.room));
    spans[place.path].push_back({request, op, memory, place.offset, take});
    offset += take;
    memory += take;
    nbytes -= take;
  }
  for (std::size_t path = 0; path < spans.size(); ++path) {
    if (!spans[path].empty()) paths_[path]->submit(std::move(spans[path]));
  }
  return request;
}

void Store::close_in_child() noexcept {
  for (auto& path : paths_) path->close_in_child();
}

}  // namespace zero_nvme
