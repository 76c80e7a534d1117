// The part of io_uring's kernel interface that is used here, so that headers of any age will do.
// Source: include/uapi/linux/io_uring.h of Linux 6.1; the layout is fixed for ever.
#pragma once

#include <cstdint>

namespace zero_nvme::uring {

constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // system calls, the same on every architecture but alpha

constexpr std::uint32_t kSetupCqSize = 1u << 3, kSetupClamp = 1u << 4, kSetupDisabled = 1u << 6;
constexpr std::uint32_t kSetupSingleIssuer = 1u << 12, kSetupDeferTaskrun = 1u << 13;
constexpr std::uint32_t kFeatureSingleMmap = 1u << 0, kFeatureNoDrop = 1u << 1;
constexpr std::uint32_t kEnterGetEvents = 1u << 0;
constexpr std::uint8_t kRead = 22, kWrite = 23;
constexpr std::uint8_t kFixedFile = 1u << 0;
constexpr std::uint32_t kRegisterFiles = 2, kUnregisterFiles = 3, kRegisterEnableRings = 12;
constexpr std::uint64_t kOffsetSqRing = 0, kOffsetCqRing = 0x8000000, kOffsetSqes = 0x10000000;

struct Sqe {
  std::uint8_t opcode, flags;
  std::uint16_t ioprio;
  std::int32_t fd;
  std::uint64_t offset, address;
  std::uint32_t length, rw_flags;
  std::uint64_t user_data;
  std::uint16_t buffer_index, personality;
  std::uint32_t file_index;
  std::uint64_t padding[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved1;
  std::uint64_t reserved2;
};

struct CqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved1;
  std::uint64_t reserved2;
};

struct Parameters {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
static_assert(sizeof(Parameters) == 120);

}  // namespace zero_nvme::uring
