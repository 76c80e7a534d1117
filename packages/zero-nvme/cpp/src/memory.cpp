#include "zero_nvme/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace zero_nvme {

HugeMapping::HugeMapping(std::size_t nbytes) : nbytes_(nbytes) {
  mapped_bytes_ = round_up(nbytes ? nbytes : 1, kHugePage) + kHugePage;
  mapping_ = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap of " + std::to_string(mapped_bytes_) + " bytes");
  }
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(mapping_), kHugePage));
  const std::size_t used = round_up(nbytes ? nbytes : 1, kHugePage);
  ::madvise(data_, used, MADV_HUGEPAGE);  // a kernel without huge pages refuses; small pages are slower, not wrong
#ifdef MADV_WIPEONFORK
  ::madvise(data_, used, MADV_WIPEONFORK);  // refused by kernels before 4.14: fork then copies, which is slower only
#endif
}

HugeMapping::~HugeMapping() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_bytes_);
}

char* Bounce::take(std::size_t nbytes, std::size_t alignment) noexcept {
  if (nbytes > capacity_) {
    const std::size_t unit = nbytes >= kHugePage ? std::max(alignment, kHugePage) : alignment;
    const std::size_t rounded = round_up(nbytes, unit);
    data_.reset();
    data_.reset(static_cast<char*>(std::aligned_alloc(unit, rounded)));
    capacity_ = data_ ? rounded : 0;
    // Where that is refused it stays on 4 KiB pages, which is slower only.
    if (data_ && unit >= kHugePage) ::madvise(data_.get(), rounded, MADV_HUGEPAGE);
  }
  return data_.get();
}

void Bounce::release() noexcept {
  data_.reset();
  capacity_ = 0;
}

}  // namespace zero_nvme
